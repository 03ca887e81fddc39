"""One turn of one source's timers: takes what is due, claims the rows, sends and settles them. No schedule."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from compensator.core.batch_totals import BatchTotals, add
from compensator.work.claim_and_relay import ClaimedBatch
from compensator.work.pipeline import PermittedBatches, run_pipeline
from compensator.work.poison_row_isolation import SentBatch
from compensator.work.source import Source
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.timing_port import TakenTimers, TimedRow, TimerQueue

SOON_MS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerTurnOptions:
    """Rows of a batch, batches of a turn, and the lease of taken timers, after which another worker may take them.
    `ahead_ms`: so long before they are due rows are claimed, so that a commit does not make them late; they wait for
    their time in the sender's hand.
    """

    batch_rows: int = 200
    batches_max: int = 1_000
    lease_ms: int = 30_000
    ahead_ms: int = 15  # of a claim's commit 15 ms are hidden so; a cancel is too late as much sooner


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerTurnReport:
    """The result of a turn. `next_ms`: until the next timer can be taken, None: there is none; `answered`: slots that
    were asked and answered; `incomplete`: those that lost timers; `late_ms`: of each batch, for how long its first
    timer was due; `refused`: the broker may not be asked now.
    """

    report: BatchTotals
    topics: Counter[str]
    next_ms: int | None
    answered: frozenset[int]
    incomplete: frozenset[int]
    late_ms: Sequence[int]
    refused: bool


def take_timer_turn(
    source: Source,
    queue: TimerQueue,
    slots: Sequence[int],
    *,
    options: TimerTurnOptions,
    clock: Clock,
    going_on: Callable[[], bool],
) -> TimerTurnReport:
    """Run one turn. Raises BrokerError for the timing store; DatabaseUnavailable, SchemaMissing.

    First it settles what the last turn could not.
    """
    settled = source.batches.settle_again()
    work = _TimerWork(source, queue, slots, options=options, clock=clock, going_on=going_on)
    run_pipeline(work)
    return TimerTurnReport(
        report=add(settled, work.total),
        topics=work.topics,
        next_ms=_until(work.next_at_ms.values(), now_ms=clock.monotonic_ms()),
        answered=frozenset(work.next_at_ms),
        incomplete=frozenset(work.incomplete),
        late_ms=work.late_ms,
        refused=work.refused or work.total.outage is not None,
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """The timers of a claim, those of them that are due later, and when the others may be sent."""

    taken: Sequence[TakenTimers]
    later_ms: Mapping[TimedRow, int]
    due_at_ms: int


class _TimerWork:
    """One turn, as the steps of run_pipeline(). Each field is written by only one of the steps."""

    def __init__(
        self,
        source: Source,
        queue: TimerQueue,
        slots: Sequence[int],
        *,
        options: TimerTurnOptions,
        clock: Clock,
        going_on: Callable[[], bool],
    ) -> None:
        self.total = BatchTotals()
        self.topics: Counter[str] = Counter()
        self.next_at_ms: dict[int, int | None] = {}
        """By slot, when its next timer can be taken: the batch that is sent after a take may last longer than that."""
        self.incomplete: set[int] = set()
        self.late_ms: list[int] = []
        self._permitted = PermittedBatches(source, rows=options.batch_rows)
        self._source = source
        self._queue = queue
        self._slots = slots
        self._options = options
        self._clock = clock
        self._going_on = going_on
        self._begun = 0
        self._may_have_more = True
        self._unasked = list(slots)
        """Each slot is asked at least once a turn, also where there are more of them than rows of a batch."""
        self._batches: dict[str, _Batch] = {}
        self._never = threading.Event()

    def claim(self) -> ClaimedBatch | None:
        while self.more() and not self.stopped():
            claimed = self._permitted.claim(self._claim)
            if claimed is not None or self._permitted.refused:
                return claimed
        return None

    def send(self, claimed: ClaimedBatch, *, accepted: Mapping[str, Collection[str]]) -> SentBatch:
        self._wait_until(self._batches[claimed.token].due_at_ms)
        sent = self._permitted.send(claimed, accepted=accepted)
        self.topics += claimed.topics
        return sent

    def settle(self, sent: SentBatch) -> None:
        """The row first: a timer that is left is taken again, and finds no row."""
        self.total = add(self.total, self._source.batches.settle(sent))
        batch = self._batches.pop(sent.token)
        self._queue.settle(batch.taken, later_ms=batch.later_ms)

    def release(self, claimed: ClaimedBatch, *, error: BrokerError | None) -> None:
        """After an outage the compensator sends the rows when the broker is back; else they are due now."""
        batch = self._batches.pop(claimed.token)
        self._permitted.release(claimed, error=error)
        soon = {} if error is not None else {row: SOON_MS for slot_timers in batch.taken for row in slot_timers.rows}
        self._queue.settle(batch.taken, later_ms={**soon, **batch.later_ms})

    @property
    def refused(self) -> bool:
        """Whether the broker may not be asked now."""
        return self._permitted.refused

    def more(self) -> bool:
        return self._may_have_more and self._begun < self._options.batches_max

    def stopped(self) -> bool:
        return not self._going_on()

    def _claim(self, rows_max: int) -> ClaimedBatch | None:
        self._begun += 1
        taken = self._take(rows_max)
        rows = [row for slot_timers in taken for row in slot_timers.rows]
        if not rows:
            return None
        claimed = self._source.batches.claim_timed(rows, ahead_ms=self._options.ahead_ms, clock=self._clock)
        if claimed.batch.rows:
            self._batches[claimed.batch.token] = _Batch(taken, claimed.later_ms, claimed.due_at_ms)
        else:
            self._queue.settle(taken, later_ms=claimed.later_ms)
        return claimed.batch

    def _wait_until(self, moment_ms: int) -> None:
        """Wait, not even interrupted by the end of the service: it is a few milliseconds, and nothing is sent early."""
        while (left_ms := moment_ms - self._clock.monotonic_ms()) > 0:
            self._never.wait(left_ms / 1_000)

    def _take(self, rows_max: int) -> Sequence[TakenTimers]:
        limit = self._source.batches.room(rows_max)
        asked_slots, self._unasked = self._unasked[:limit], self._unasked[limit:]
        options = self._options
        taken = self._queue.take(
            asked_slots or self._slots, limit=limit, lease_ms=options.lease_ms, ahead_ms=options.ahead_ms
        )
        self._may_have_more = bool(self._unasked) or any(slot_timers.rows for slot_timers in taken)
        self.late_ms += [slot_timers.late_ms for slot_timers in taken if slot_timers.rows]
        now_ms = self._clock.monotonic_ms()
        for slot_timers in taken:
            self.next_at_ms[slot_timers.slot] = None if slot_timers.next_ms is None else now_ms + slot_timers.next_ms
            if not slot_timers.complete:
                self.incomplete.add(slot_timers.slot)
        return taken


def _until(moments_ms: Iterable[int | None], *, now_ms: int) -> int | None:
    """Returns how long until the first of these moments, at least 0; None: there is none."""
    first_ms = min((ms for ms in moments_ms if ms is not None), default=None)
    return None if first_ms is None else max(0, first_ms - now_ms)
