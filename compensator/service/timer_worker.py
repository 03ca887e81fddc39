"""TimerWorker: sends the due timers of one source from a thread, and rebuilds its timing store when that lost them.

The compensator's polls find every row that this misses. So while the timing store, the database or the broker is out,
it waits; nothing else waits for it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from compensator.service.metrics import CompensatorMetrics
from compensator.work.source import Source
from compensator.work.source_schedule import NoRowsDue
from compensator.work.source_turn import TurnReport
from compensator.work.timer_rebuild import RebuildOptions, RebuildProgress, rebuild_timers
from compensator.work.timer_turn import TimerTurnOptions, TimerTurnReport, take_timer_turn
from outbox_core.assignment.even_assignment import Resource
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, OutboxError
from outbox_core.messages.timing_port import SlotServer, TimingStore
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_SECOND_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerWorkerOptions:
    """`idle_ms`: the longest sleep, also without a connection for wake-ups; `held_ms`: without slots, or while the
    broker is out. `rebuild_again_ms`: between the starts of two rebuilds.
    """

    idle_ms: int = 5_000
    held_ms: int = 500
    rebuild_again_ms: int = 5_000
    turn: TimerTurnOptions = field(default_factory=TimerTurnOptions)
    rebuild: RebuildOptions = field(default_factory=RebuildOptions)
    failure: Backoff = field(default_factory=lambda: Backoff(initial_ms=500, max_ms=10_000, jitter=0.5))


class TimerWorker:
    """Serves the slots that are assigned to it. start() and stop() are idempotent; no error ends the loop."""

    def __init__(
        self,
        source: Source,
        store: TimingStore,
        *,
        options: TimerWorkerOptions,
        metrics: CompensatorMetrics,
        clock: Clock,
        random: Random | None = None,
    ) -> None:
        self._source = source
        self._store = store
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._random = random or Random()
        self._slots = {f"{source.name}#timers-{slot}": slot for slot in range(store.slots)}
        self._mine: Sequence[int] = ()
        self._problem: str | None = None
        self._failures = 0
        self._prepared = False
        self._rebuilding: threading.Thread | None = None
        self._rebuild_from_ms = 0
        self._progress: RebuildProgress | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compensator-timers", daemon=True)
        self._started = False

    @property
    def source(self) -> str:
        """The name of its source."""
        return self._source.name

    @property
    def resources(self) -> list[Resource]:
        """The slots, as resources to be assigned."""
        return [Resource(name, self._source.source_name.zone) for name in self._slots]

    @property
    def problem(self) -> str | None:
        """Why timers do not fire now, so that rows go out by the compensator's polls alone; None: they do."""
        return self._problem

    def check(self) -> None:
        """Prepare the store, at start. Raises ConfigurationError; an outage is only logged."""
        try:
            self._prepare()
        except BrokerError as error:
            self._fail(str(error))

    def assign(self, names: Collection[str]) -> None:
        """Serve those of the named resources that are slots of this source. A turn over others ends after its batch."""
        self._mine = [slot for name, slot in self._slots.items() if name in names]

    def report(self, instance: str) -> None:
        """Announce in the store that this instance serves its slots, and record what they hold. Raises BrokerError."""
        my_slots = self._mine
        if not my_slots:
            self._metrics.forget_timers(self.source)
            return
        if not self._prepared:
            self._metrics.record_slots(self.source, [])
            return
        progress = self._progress
        server = SlotServer(
            host=socket.gethostname(),
            process=os.getpid(),
            instance=instance,
            rebuilt_rows=None if progress is None else progress.rows,
            rows_to_rebuild=None if progress is None else progress.total,
        )
        self._metrics.record_slots(self.source, self._store.statuses(my_slots))
        self._store.announce(my_slots, server)

    def start(self) -> None:
        """Start the thread."""
        if not self._started:
            self._started = True
            self._thread.start()

    def begin_stop(self) -> None:
        """Take no more timers. Does not wait."""
        self._stopping.set()

    def stop(self, *, timeout_ms: int) -> bool:
        """Finish the batches in progress; True if that was done in time."""
        self._stopping.set()
        ends_ms = self._clock.monotonic_ms() + timeout_ms
        for thread in (self._thread, self._rebuilding):
            if thread is not None and thread.ident is not None:
                thread.join(max(0, ends_ms - self._clock.monotonic_ms()) / _SECOND_MS)
        self._store.close()
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                wait_ms = self._turn()
            except OutboxError as error:
                self._fail(str(error))
            except Exception as error:  # the thread boundary: the next turn must come, whatever this one raised
                logger.exception("timer_turn_failed", extra={"source": self.source})
                self._fail(str(error))
            else:
                self._failures = 0
                if wait_ms:
                    self._store.wait(min(wait_ms, self._options.idle_ms))

    def _turn(self) -> int:
        """Serve the slots once; returns how long to sleep, unless an earlier timer is added."""
        if not self._prepared:
            self._prepare()
        options, gate = self._options.turn, self._source.gate
        my_slots = self._mine
        if not my_slots or gate.wait_ms(options.batch_rows):
            self._problem = None
            self._stopping.wait(self._options.held_ms / _SECOND_MS)
            return 0
        began_ms = self._clock.monotonic_ms()
        turn_report = take_timer_turn(
            self._source, self._store, my_slots, options=options, clock=self._clock,
            going_on=lambda: not self._stopping.is_set() and self._mine == my_slots,
        )  # fmt: skip
        silent = [] if turn_report.refused else sorted(set(my_slots) - turn_report.answered)
        self._problem = f"the slots {silent} of the timing store do not answer" if silent else None
        self._record(turn_report, seconds=(self._clock.monotonic_ms() - began_ms) / _SECOND_MS)
        if turn_report.incomplete:
            self._begin_rebuild(sorted(turn_report.incomplete))
        return self._options.idle_ms if turn_report.next_ms is None else turn_report.next_ms

    def _prepare(self) -> None:
        self._store.prepare()
        self._prepared = True

    def _fail(self, error: str) -> None:
        """Wait: the longer the more turns in a row failed. The store is checked anew: it may be another server."""
        self._prepared = False
        self._failures += 1
        self._problem = error
        self._metrics.record_timer_failure(self.source)
        logger.warning("timers_held", extra={"source": self.source, "failures": self._failures, "error": error})
        self._stopping.wait(self._options.failure.delay_ms(self._failures, self._random) / _SECOND_MS)

    def _record(self, turn_report: TimerTurnReport, *, seconds: float) -> None:
        self._metrics.record_timers(self.source, late_ms=turn_report.late_ms, complete=not turn_report.incomplete)
        if turn_report.report.claimed:
            turn = TurnReport(outcome=NoRowsDue(found=True), report=turn_report.report, topics=turn_report.topics)
            self._metrics.record_turn(self.source, turn, seconds=seconds, now_seconds=self._clock.now_ms() / _SECOND_MS)

    # -- rebuilds ----------------------------------------------------------------------------------------------------

    def _begin_rebuild(self, slots: Sequence[int]) -> None:
        """Rebuild in a thread of its own: what is due goes on firing."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._rebuild_from_ms or (self._rebuilding is not None and self._rebuilding.is_alive()):
            return
        self._rebuild_from_ms = now_ms + self._options.rebuild_again_ms
        self._rebuilding = threading.Thread(target=self._rebuild, args=(slots,), name="timer-rebuild", daemon=True)
        self._rebuilding.start()

    def _rebuild(self, slots: Sequence[int]) -> None:
        try:
            rebuild_timers(
                self._source.pending_rows,
                self._store,
                slots,
                options=self._options.rebuild,
                clock=self._clock,
                stopping=self._stopping,
                on_progress=self._record_rebuild,
            )
        except OutboxError as error:
            logger.warning("timer_rebuild_failed", extra={"source": self.source, "error": str(error)})
        except Exception:  # the thread boundary: the next turn begins another one
            logger.exception("timer_rebuild_failed", extra={"source": self.source})
        finally:
            self._progress = None

    def _record_rebuild(self, progress: RebuildProgress) -> None:
        self._progress = progress
        self._metrics.record_rebuild(self.source, rows=progress.rows, total=progress.total)
