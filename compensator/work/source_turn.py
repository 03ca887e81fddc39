"""One turn of one source: a poll, then batches as long as the gate permits them. No schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from compensator.core.batch_totals import BatchTotals, add
from compensator.work.claim_and_relay import ClaimedBatch, TableScan
from compensator.work.due_tables import TableDue
from compensator.work.pipeline import PermittedBatches, run_pipeline
from compensator.work.poison_row_isolation import SentBatch
from compensator.work.source import Source
from compensator.work.source_schedule import DatabaseFailure, HeldBack, MoreRowsDue, NoRowsDue, Outcome
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError

_MS_US: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Limits of a turn, after which other sources have theirs: rows of a batch, batches, and time. `held_poll_ms`: so
    long after the last poll a source that is held back is polled all the same.
    """

    batch_rows: int = 200
    batches_max: int = 50
    turn_ms_max: int = 1_000
    held_poll_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """The result of a turn. `oldest_due_us`: for how long the longest due row was due; None: without a poll.
    `pending`: False if a full scan found no pending row at all.
    """

    outcome: Outcome
    report: BatchTotals = field(default_factory=BatchTotals)
    topics: Counter[str] = field(default_factory=Counter)
    oldest_due_us: int | None = None
    pending: bool = True


class Turns:
    """The turns of one source. Each continues where the last one ended, so that a full table does not block others."""

    def __init__(self, source: Source, *, options: TurnOptions, clock: Clock) -> None:
        self.source = source
        self._options = options
        self._clock = clock
        self._last_table = ""
        self._polled_ms: int | None = None
        """When the last turn polled that ended well; None: none did since the database last failed or another instance
        served the source.
        """

    def take(self, *, going_on: Callable[[], bool]) -> TurnReport:
        """Run one turn. `going_on` is called before each claim and send. Raises DatabaseUnavailable, SchemaMissing.

        First it settles what the last turn could not, whether or not the broker may be asked.
        """
        settled = self.source.batches.settle_again()
        held_ms = self.source.gate.wait_ms(self._options.batch_rows)
        if held_ms and self._is_polled_lately():
            return TurnReport(outcome=HeldBack(held_ms), report=settled)
        began_ms, self._polled_ms = self._clock.monotonic_ms(), None
        polled = self.source.poll()
        tables_due = polled.due
        scans = _due(tables_due, after=self._last_table)
        work = _TurnWork(self.source, scans, options=self._options, clock=self._clock, going_on=going_on)
        try:
            run_pipeline(work)
        finally:
            self._last_table = work.last_table or self._last_table
        self._polled_ms = began_ms
        return TurnReport(
            outcome=work.outcome(next_due_ms=_next_due_ms(tables_due)),
            report=add(settled, add(work.total, BatchTotals(held=work.held))),
            topics=work.topics,
            oldest_due_us=max(0, -tables_due[0].due_in_us) if tables_due else 0,
            pending=bool(tables_due) or not polled.whole,
        )

    def forget_poll(self) -> None:
        """Poll in the next turn, even if it is held back: what was known is another instance's by now."""
        self._polled_ms = None

    def _is_polled_lately(self) -> bool:
        """Whether the source needs no poll while its broker's pause or a rate holds it back: the age of its oldest row,
        and whether its database answers, are known from polls alone.
        """
        age_ms = None if self._polled_ms is None else self._clock.monotonic_ms() - self._polled_ms
        return age_ms is not None and age_ms < self._options.held_poll_ms


class _TurnWork:
    """One turn, as the steps of run_pipeline(). Each field is written by only one of the steps."""

    def __init__(
        self,
        source: Source,
        scans: Sequence[TableScan],
        *,
        options: TurnOptions,
        clock: Clock,
        going_on: Callable[[], bool],
    ) -> None:
        self.total = BatchTotals()
        self.topics: Counter[str] = Counter()
        self.last_table = ""
        self.held = 0
        self._source = source
        self._scans = scans
        self._options = options
        self._clock = clock
        self._going_on = going_on
        self._ends_ms = clock.monotonic_ms() + options.turn_ms_max
        self._begun = 0
        self._permitted = PermittedBatches(source, rows=options.batch_rows)

    def outcome(self, *, next_due_ms: int | None) -> Outcome:
        """The outcome, which decides when the source has its next turn."""
        report = self.total
        if self._permitted.refused or report.outage is not None:
            return HeldBack(max(1, self._source.gate.wait_ms(self._options.batch_rows)))
        if report.defects and not report.accepted:
            return DatabaseFailure()  # an adapter that fails for every row must not cause a busy loop
        if self._scans:
            return MoreRowsDue()
        return NoRowsDue(found=report.claimed > 0, next_due_ms=next_due_ms)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def claim(self) -> ClaimedBatch | None:
        while self.more() and not self.stopped():
            claimed = self._permitted.claim(self._claim)
            if claimed is not None or self._permitted.refused:
                return claimed  # else other claims took all of them: there may be more
        return None

    def send(self, claimed: ClaimedBatch, *, accepted: Mapping[str, Collection[str]]) -> SentBatch:
        sent = self._permitted.send(claimed, accepted=accepted)
        self.topics += claimed.topics
        return sent

    def settle(self, sent: SentBatch) -> None:
        self.total = add(self.total, self._source.batches.settle(sent))

    def release(self, claimed: ClaimedBatch, *, error: BrokerError | None) -> None:
        self._permitted.release(claimed, error=error)

    def more(self) -> bool:
        in_time = not self._begun or self._clock.monotonic_ms() < self._ends_ms
        return bool(self._scans) and self._begun < self._options.batches_max and in_time

    def stopped(self) -> bool:
        return not self._going_on()

    def _claim(self, rows_max: int) -> ClaimedBatch:
        self._begun += 1
        claimed = self._source.batches.claim(self._scans, rows_max=rows_max)
        self._scans, self.last_table = claimed.scans_left, claimed.last_table
        self.held += claimed.held
        return claimed


def _due(tables_due: Sequence[TableDue], *, after: str) -> list[TableScan]:
    """Returns the due tables, each from its first due row on, beginning after the one that was served last."""
    scans = [
        TableScan(table_due.table, table_due.due_at_us)
        for table_due in sorted(tables_due, key=_table)
        if table_due.due_in_us <= 0
    ]
    return [scan for scan in scans if scan.table > after] + [scan for scan in scans if scan.table <= after]


def _table(table_due: TableDue) -> str:
    return table_due.table


def _next_due_ms(tables_due: Sequence[TableDue]) -> int | None:
    later = [table_due.due_in_us for table_due in tables_due if table_due.due_in_us > 0]
    return -(-min(later) // _MS_US) if later else None
