"""The compensator as a service: workers that run turns of sources, periodic work, an orderly stop.

work.source_schedule and admission.circuit_breaker decide when a source has its turn; work.source_turn executes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from compensator.admission.circuit_breaker import BreakerState
from compensator.admission.gate import Gates
from compensator.assignment import Assignment, UnleasedAssignment
from compensator.service.health import Health, HealthSnapshot, health_of
from compensator.service.metrics import CompensatorMetrics
from compensator.service.periodic_work import PeriodicTasks
from compensator.service.source_upkeep import Upkeep, UpkeepOptions
from compensator.service.timer_worker import TimerWorker
from compensator.work.source import Source
from compensator.work.source_schedule import DatabaseFailure, Outcome, PacingOptions, TurnQueue
from compensator.work.source_turn import TurnOptions, TurnReport, Turns
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerError, OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

WAIT_MS_MAX: Final = 5_000
STALE_AFTER_IDLES: Final = 3
STALE_AFTER_MS_MIN: Final = 10_000
STALE_AFTER_BEATS: Final = 15
STUCK_AFTER_MS: Final = 15 * 60 * 1_000
"""Time-outs bound a turn far below this; a process all of whose workers exceed it will not recover by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How many sources are served concurrently, how each is paced, and how long a stop may take.

    `suspects_max`: how many workers may serve sources whose last turn failed; by default a quarter of them.
    """

    workers: int = 4
    suspects_max: int | None = None
    pacing: PacingOptions = field(default_factory=PacingOptions)
    turn: TurnOptions = field(default_factory=TurnOptions)
    upkeep: UpkeepOptions = field(default_factory=UpkeepOptions)
    beat_ms: int = 2_000
    timers_report_ms: int = 5_000
    stop_timeout_ms: int = 25_000


class CompensatorService:
    """Serves sources until stopped. start() and stop() are idempotent; a failing turn never ends the loop."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        gates: Gates,
        options: ServiceOptions,
        metrics: CompensatorMetrics,
        assignment: Assignment | None = None,
        timers: Sequence[TimerWorker] = (),
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """`timers`: the workers of sources with a timing store."""
        self._timers = timers
        self._options = options
        self._metrics = metrics
        self._gates = gates
        self._assignment = assignment or UnleasedAssignment()
        self._clock = clock or SystemClock()
        self._sources = {source.name: source for source in sources}
        self._turns = {source.name: Turns(source, options=options.turn, clock=self._clock) for source in sources}
        self._mine: frozenset[str] = frozenset()
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        suspects_max = options.suspects_max or max(1, options.workers // 4)
        self._queue = TurnQueue(options.pacing, suspects_max=suspects_max, random=random or Random())
        self._began_ms: dict[str, int] = {}
        self._last_success_ms = self._last_beat_ms = self._clock.monotonic_ms()
        self._workers = [
            threading.Thread(target=self._work, name=f"compensator-{worker_number}", daemon=True)
            for worker_number in range(options.workers)
        ]
        self._started = False
        self._stopped: bool | None = None
        self._tasks = PeriodicTasks(clock=self._clock, failed=metrics.record_task_failure)
        self._upkeep = Upkeep(metrics, options=options.upkeep, clock=self._clock, stopping=self._stopping)
        gates.listen(self._breaker_changed)
        for broker in gates.states:
            metrics.watch_broker(broker, partial(gates.is_out, broker))

    # -- public methods ----------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> PeriodicTasks:
        """The periodic work, to which an entry point may add more. Before start()."""
        return self._tasks

    def start(self) -> None:
        """Start: every source of this instance has its first turn at once. Raises UsageError if leases cannot work."""
        if self._started:
            return
        self._beat()
        self._started = True
        self._tasks.add("beat", self._beat, every_ms=self._options.beat_ms)
        self._tasks.add(
            "gauges", lambda: self._upkeep.count(self._well()), every_ms=self._options.upkeep.gauges_check_ms
        )
        self._tasks.add(
            "retention", lambda: self._upkeep.retain(self._well()), every_ms=self._options.upkeep.retention_ms
        )
        for index, timer_worker in enumerate(self._timers):
            self._tasks.add(
                f"timers-{index}", partial(self._report, timer_worker), every_ms=self._options.timers_report_ms
            )
        self._tasks.start()
        for worker in self._workers:
            worker.start()
        for timer_worker in self._timers:
            timer_worker.start()

    def stop(self) -> bool:
        """Finish the batches in progress, claim no more, release the leases; True if that was done in time."""
        if self._stopped is None:
            self._stopped = self._stop()
        return self._stopped

    def health(self) -> Health:
        """The health checks and their results, see compensator.service.health."""
        now_ms = self._clock.monotonic_ms()
        with self._changed:
            failing = sorted(name for name in self._mine if self._queue.failures(name))
        idle_ms = max(self._options.pacing.idle_ms, self._options.pacing.interval_ms)
        return health_of(
            HealthSnapshot(
                stopping=self._stopping.is_set(),
                sources=len(self._sources),
                ours=len(self._mine),
                failing=failing,
                breakers=self._gates.states,
                seconds_since_success=(now_ms - self._last_success_ms) / 1_000,
                seconds_since_beat=(now_ms - self._last_beat_ms) / 1_000,
                beat_problem=self._assignment.problem,
                workers=len(self._workers) if self._started else 0,
                workers_alive=sum(worker.is_alive() for worker in self._workers),
                success_within_seconds=max(STALE_AFTER_IDLES * idle_ms, STALE_AFTER_MS_MIN) / 1_000,
                beat_within_seconds=STALE_AFTER_BEATS * self._options.beat_ms / 1_000,
                timers={timer_worker.source: timer_worker.problem for timer_worker in self._timers},
            )
        )

    def alive(self) -> bool:
        """Whether any worker is neither dead nor stuck, for liveness probes. Reads no database."""
        now_ms = self._clock.monotonic_ms()
        with self._changed:
            stuck = sum(now_ms - began_ms > STUCK_AFTER_MS for began_ms in self._began_ms.values())
        return not self._started or sum(worker.is_alive() for worker in self._workers) > stuck

    # -- the workers -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (name := self._next()) is not None:
            outcome = self._serve(name)
            with self._changed:
                self._began_ms.pop(name, None)
                self._queue.done(name, outcome, now_ms=self._clock.monotonic_ms())
                self._changed.notify_all()
            self._tasks.mind_clock()

    def _next(self) -> str | None:
        """Wait for the next source whose turn it is. None: the service stops."""
        with self._changed:
            while not self._stopping.is_set():
                now_ms = self._clock.monotonic_ms()
                name = self._queue.take(now_ms=now_ms)
                if name is not None:
                    self._began_ms[name] = now_ms
                    return name
                wait_ms = self._queue.wait_ms(now_ms=now_ms)
                self._clock.wait(self._changed, WAIT_MS_MAX if wait_ms is None else min(wait_ms, WAIT_MS_MAX))
                self._tasks.mind_clock()
        return None

    def _serve(self, name: str) -> Outcome:
        began_ms = self._clock.monotonic_ms()
        try:
            turn = self._turns[name].take(going_on=lambda: name in self._mine and not self._stopping.is_set())
        except OutboxError as error:
            self._metrics.record_failed_turn(name)
            logger.warning("turn_failed", extra={"source": name, "error": str(error)})
            return DatabaseFailure()
        except Exception:  # the thread boundary: the next turn must come, whatever this one raised
            self._metrics.record_failed_turn(name)
            logger.exception("turn_failed", extra={"source": name})
            return DatabaseFailure()
        self._last_success_ms = self._clock.monotonic_ms()
        seconds = (self._last_success_ms - began_ms) / 1_000
        self._metrics.record_turn(name, turn, seconds=seconds, now_seconds=self._clock.now_ms() / 1_000)
        if turn.report.claimed:
            self._upkeep.busy(name)
            _log_turn(name, turn)
        return turn.outcome

    def _breaker_changed(self, broker: str, state: BreakerState) -> None:
        """Give all sources of the broker a turn at once, ahead of schedule, but for those whose database is out: that
        costs few queries. Half open admits no source but the one whose probe it is.
        """
        if state is BreakerState.HALF_OPEN:
            return
        with self._changed:
            concerned = [name for name, source in self._sources.items() if source.broker == broker]
            self._queue.hasten(concerned, now_ms=self._clock.monotonic_ms())
            self._changed.notify_all()

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        slots = [slot for timer_worker in self._timers for slot in timer_worker.resources]
        assigned = self._assignment.beat([*(source.source_name for source in self._sources.values()), *slots])
        my_sources = assigned.intersection(self._sources)
        failed, now_ms = self._assignment.failed_beats, self._clock.monotonic_ms()
        with self._changed:
            if self._stopping.is_set():
                return
            changed = my_sources != self._mine or not self._started
            for name in my_sources - self._mine:
                self._turns[name].forget_poll()
            self._mine = my_sources
            if changed:  # before a worker can have a turn of a new source
                self._metrics.set_served({name: name in my_sources for name in self._sources})
            if not failed:  # else the instance keeps its sources, but the beat did not succeed
                self._last_beat_ms = now_ms
            if not failed and not my_sources:
                self._last_success_ms = now_ms  # a stand-by is healthy as long as its beats succeed
            self._queue.keep(sorted(my_sources), now_ms=now_ms)
            self._changed.notify_all()
        for timer_worker in self._timers:
            timer_worker.assign(assigned)
        self._metrics.record_beat(failed=failed, sources=len(my_sources))

    def _report(self, worker: TimerWorker) -> None:
        """An outage is the worker's to report."""
        with contextlib.suppress(BrokerError):
            worker.report(self._assignment.instance)

    def _well(self) -> list[Source]:
        """Sources of this instance whose last turn did not fail."""
        with self._changed:
            return [self._sources[name] for name in sorted(self._mine) if not self._queue.failures(name)]

    # -- stopping --------------------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        ends_ms = SystemClock().monotonic_ms() + self._options.stop_timeout_ms
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        for timer_worker in self._timers:
            timer_worker.begin_stop()
        ended = [timer_worker.stop(timeout_ms=_left_ms(ends_ms)) for timer_worker in self._timers]
        ended += [self._ended(worker, ends_ms) for worker in self._workers]
        ended.append(self._tasks.stop(timeout_ms=_left_ms(ends_ms)))
        for source in self._sources.values():
            with contextlib.suppress(OutboxError):  # the last attempt: else the rows are sent again
                source.batches.settle_again()
        self._mine = frozenset()
        self._assignment.leave()
        return all(ended)

    def _ended(self, worker: threading.Thread, ends_ms: int) -> bool:
        if self._started:
            worker.join(_left_ms(ends_ms) / 1_000)
        return not worker.is_alive()


def _left_ms(ends_ms: int) -> int:
    """Returns the time left, by the machine's clock, whatever clock the turns use."""
    return max(0, ends_ms - SystemClock().monotonic_ms())


def _log_turn(name: str, turn: TurnReport) -> None:
    report = turn.report
    logger.info(
        "turn_done",
        extra={
            "source": name,
            "claimed": report.claimed,
            "accepted": report.accepted,
            "retried": report.retried,
            "held": report.held,
            "parked": report.parked,
            "outage": str(report.outage) if report.outage else None,
        },
    )
