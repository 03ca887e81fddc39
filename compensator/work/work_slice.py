"""One turn of one source: look, then batch after batch while its gate lets them through. No schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from compensator.admission.circuit_breaker import Permit
from compensator.core.batch_totals import PassReport, add
from compensator.work.claim_and_relay import Claimed, Walk
from compensator.work.due_row_query import TableDue
from compensator.work.pipeline import work_off
from compensator.work.poison_rows import Sent
from compensator.work.source import Source
from compensator.work.source_schedule import Failed, HeldBack, More, Outcome, Quiet
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError

_MS_US: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """What a turn takes before others have theirs: rows at once, batches, and time."""

    batch_rows: int = 200
    batches_max: int = 50
    turn_ms_max: int = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """What a turn came to. `oldest_due_us`: for how long the longest due row was due; None: nobody looked.
    `pending`: False where a whole look found no pending row at all.
    """

    outcome: Outcome
    report: PassReport = field(default_factory=PassReport)
    topics: Counter[str] = field(default_factory=Counter)
    oldest_due_us: int | None = None
    pending: bool = True


class Turns:
    """The turns of one source. It remembers where the last one ended, so that a full table keeps no other waiting."""

    def __init__(self, source: Source, *, options: TurnOptions, clock: Clock) -> None:
        self.source = source
        self._options = options
        self._clock = clock
        self._last_table = ""

    def take(self, *, going_on: Callable[[], bool]) -> TurnReport:
        """One turn. `going_on` is asked before each claim and send. Raises DatabaseUnavailable, SchemaMissing."""
        held_ms = self.source.gate.wait_ms(self._options.batch_rows)
        if held_ms:
            return TurnReport(outcome=HeldBack(held_ms))
        look = self.source.look()
        found = look.due
        walks = _due(found, after=self._last_table)
        work = _TurnWork(self.source, walks, options=self._options, clock=self._clock, going_on=going_on)
        try:
            work_off(work)
        finally:
            self._last_table = work.last_table or self._last_table
        return TurnReport(
            outcome=work.outcome(next_due_ms=_next_due_ms(found)),
            report=add(work.total, PassReport(held=work.held)),
            topics=work.topics,
            oldest_due_us=max(0, -found[0].due_in_us) if found else 0,
            pending=bool(found) or not look.whole,
        )


class _TurnWork:
    """One turn, as work_off() asks for it. Each field is written by one of the steps alone."""

    def __init__(
        self,
        source: Source,
        walks: Sequence[Walk],
        *,
        options: TurnOptions,
        clock: Clock,
        going_on: Callable[[], bool],
    ) -> None:
        self.total = PassReport()
        self.topics: Counter[str] = Counter()
        self.last_table = ""
        self.held = 0
        self._source = source
        self._walks = walks
        self._options = options
        self._clock = clock
        self._going_on = going_on
        self._ends_ms = clock.monotonic_ms() + options.turn_ms_max
        self._begun = 0
        self._shut = False
        self._permits: dict[str, Permit] = {}

    def outcome(self, *, next_due_ms: int | None) -> Outcome:
        """What follows from how it went."""
        report = self.total
        if self._shut or report.outage is not None:
            return HeldBack(max(1, self._source.gate.wait_ms(self._options.batch_rows)))
        if report.defects and not report.accepted:
            return Failed()  # an adapter that is broken for everything is no reason to spin
        if self._walks:
            return More()
        return Quiet(found=report.claimed > 0, next_due_ms=next_due_ms)

    # -- the steps ---------------------------------------------------------------------------------------------------

    def claim(self) -> Claimed | None:
        while self.more() and not self.stopped():
            permit = self._source.gate.permit(self._options.batch_rows)
            self._shut = permit is None
            if permit is None:
                return None
            claimed = self._claim(permit)
            if claimed.rows:
                return claimed  # else others were quicker with all of them: there may be more
        return None

    def send(self, claimed: Claimed, *, accepted: Mapping[str, Collection[str]]) -> Sent:
        answer = None
        try:
            sent = self._source.batches.send(claimed, accepted=accepted)
            answer = sent.answer
        finally:
            self._source.gate.settle(self._permits.pop(claimed.token), answer)
        self.topics += claimed.topics
        return sent

    def settle(self, sent: Sent) -> None:
        self.total = add(self.total, self._source.batches.settle(sent))

    def release(self, claimed: Claimed, *, error: BrokerError | None) -> None:
        self._source.gate.settle(self._permits.pop(claimed.token), None)
        self._source.batches.release(claimed, error=error)

    def more(self) -> bool:
        in_time = not self._begun or self._clock.monotonic_ms() < self._ends_ms
        return bool(self._walks) and self._begun < self._options.batches_max and in_time

    def stopped(self) -> bool:
        return not self._going_on()

    def _claim(self, permit: Permit) -> Claimed:
        self._begun += 1
        try:
            claimed = self._source.batches.claim(self._walks, rows_max=permit.rows)
        except BaseException:
            self._source.gate.settle(permit, None)
            raise
        self._walks, self.last_table = claimed.walks_left, claimed.last_table
        self.held += claimed.held
        if claimed.rows:
            self._permits[claimed.token] = permit
        else:
            self._source.gate.settle(permit, None)
        return claimed


def _due(found: Sequence[TableDue], *, after: str) -> list[Walk]:
    """The tables that are due, each from its first due row on, beginning behind the one that was served last."""
    walks = [Walk(one.table, one.due_at_us) for one in sorted(found, key=_table) if one.due_in_us <= 0]
    return [walk for walk in walks if walk.table > after] + [walk for walk in walks if walk.table <= after]


def _table(one: TableDue) -> str:
    return one.table


def _next_due_ms(found: Sequence[TableDue]) -> int | None:
    later = [one.due_in_us for one in found if one.due_in_us > 0]
    return -(-min(later) // _MS_US) if later else None
