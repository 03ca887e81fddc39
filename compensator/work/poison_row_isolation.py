"""Isolates rows on which an adapter or our own code fails: one poison row must not fail its batch forever.

A batch that fails with an unforeseen error is split until the failing rows are alone; they are postponed by their own
backoff, and all others are sent. Errors that the relay documents pass through.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final, TypeVar, assert_never

from sqlalchemy import Engine

from compensator.core.batch_totals import OUTCOMES, BatchTotals, add
from outbox.delivery.relay import ORDERED_OUTAGE_DELAY_MS, Decision, Hold, Relay, RelayPolicy, RowSettlement
from outbox.store.database import database_errors
from outbox.store.message_table import MessageStore
from outbox.store.row import OutboxRow
from outbox.store.table_placement import MessageTable
from outbox_core.common.errors import BrokerError, OutboxError
from outbox_core.messages.delivery_decision import Acceptance, Park, Retry
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)
T = TypeVar("T")

DEFECTS_PER_BATCH_MAX: Final = 32
"""Four poison rows among 200 are found in fewer calls; if every call fails, splitting further is useless."""
UNFORESEEN: Final = "an error that nobody foresaw; the compensator's log has it as delivery_defect"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBatch:
    """A batch that the broker has answered. `settlements` are not written yet; `settled` are those already written,
    once all are, or if the batch had to be split. `in_time`: as in Relay.send, if they have to be sent again.

    After a settlement that failed with `error`, `unsettled` are those of the settlements that are not written yet, and
    `stale` counts the rows among the others that had another owner.
    """

    rows: Sequence[OutboxRow]
    token: str
    settlements: Sequence[RowSettlement] = ()
    outage: BrokerError | None = None
    settled: BatchTotals | None = None
    in_time: Callable[[], bool] = lambda: True
    unsettled: Sequence[RowSettlement] | None = None
    stale: int = 0
    error: OutboxError | None = None

    @property
    def accepted(self) -> Mapping[str, Collection[str]]:
        """By order key, the ids that the broker accepted."""
        accepted_ids: defaultdict[str, set[str]] = defaultdict(set)
        for settlement in self.settlements:
            if settlement.key_and_number is not None and isinstance(settlement.decision, Acceptance):
                accepted_ids[settlement.key_and_number[0]].add(settlement.row_id)
        return accepted_ids

    @property
    def answer(self) -> BatchTotals:
        """The totals of the broker's answer; whether the leases were still valid is not known yet."""
        if self.settled is not None:
            return self.settled
        counted = Counter(_word(settlement.decision) for settlement in self.settlements)
        return BatchTotals(batches=1, claimed=len(self.rows), outage=self.outage, **counted)


class IsolatingRelay:
    """The relay, with isolation of rows on which it fails. Safe in any thread."""

    def __init__(
        self, relay: Relay, *, engine: Engine, store: MessageStore, policy: RelayPolicy, random: Random
    ) -> None:
        self._relay = relay
        self._engine = engine
        self._store = store
        self._policy = policy
        self._random = random

    def send(
        self,
        rows: Sequence[OutboxRow],
        *,
        token: str,
        accepted: Mapping[str, Collection[str]],
        in_time: Callable[[], bool],
    ) -> SentBatch:
        """Send rows that `token` owns, as Relay.send does. Raises only its documented errors."""
        answer = self._try(rows, partial(self._relay.send, rows, accepted=accepted, in_time=in_time), first=True)
        if answer is not None:
            settlements, outage = answer
            return SentBatch(rows=rows, token=token, settlements=settlements, outage=outage, in_time=in_time)
        settled = self._apart(rows, token=token, in_time=in_time)
        return SentBatch(rows=rows, token=token, outage=settled.outage, settled=settled)

    def settle(self, sent: SentBatch) -> SentBatch:
        """Write the results of rows that are not written yet. Returns the batch with its `settled` totals, or with the
        error and what is left, to be settled again.
        """
        if sent.settled is not None:
            return sent
        settlements = sent.settlements if sent.unsettled is None else sent.unsettled
        report = self._try(sent.rows, partial(self._relay.settle, settlements, token=sent.token), first=True)
        if report is None:
            return replace(sent, settled=self._apart(sent.rows, token=sent.token, in_time=sent.in_time))
        stale = sent.stale + len(settlements) - len(report.unsettled) - report.changed
        if report.error is not None:
            return replace(sent, unsettled=report.unsettled, stale=stale, error=report.error)
        return replace(sent, settled=replace(sent.answer, stale=stale), unsettled=(), error=None)

    def release(self, rows: Sequence[OutboxRow], error: BrokerError | None, *, token: str) -> None:
        """Release rows that were not sent, due after a delay after an outage, else at once. Uses up no attempt."""
        tables: defaultdict[tuple[MessageTable | None, bool], list[str]] = defaultdict(list)
        for row in rows:
            tables[(row.table, row.order_key is not None)].append(row.id)
        outage_ms = self._policy.outage_delay_ms
        error_text = None if error is None else str(error)
        for (table, is_ordered), ids in tables.items():
            delay_us = min(outage_ms, ORDERED_OUTAGE_DELAY_MS) * 1_000 if is_ordered else self._spread_us(outage_ms)
            delay_us = 0 if error is None else delay_us
            with database_errors(self._engine.url), self._engine.begin() as connection:
                self._store.at(table).release(connection, ids, token=token, delay_us=delay_us, error=error_text)

    # -- splitting what failed ---------------------------------------------------------------------------------------

    def _apart(self, rows: Sequence[OutboxRow], *, token: str, in_time: Callable[[], bool]) -> BatchTotals:
        """Send a batch that has failed as a whole, split into parts, as long as its lease lasts."""
        total = BatchTotals(batches=1, claimed=len(rows), defects=1)
        parts = _parted(rows)
        while parts:
            part = parts.pop()
            if total.outage is not None:
                self.release(part, total.outage, token=token)
                total = add(total, BatchTotals(retried=len(part)))
                continue
            hopeless = len(rows) == 1 or total.defects >= DEFECTS_PER_BATCH_MAX
            report = None if hopeless else self._deliver(part, token=token, in_time=in_time)
            if report is not None:
                total = add(total, report)
            elif hopeless or len(part) == 1:
                total = add(total, self._put_off(part, token=token, defects=0 if hopeless else 1))
            else:
                parts += _parted(part)
                total = add(total, BatchTotals(defects=1))
        return total

    def _deliver(self, rows: Sequence[OutboxRow], *, token: str, in_time: Callable[[], bool]) -> BatchTotals | None:
        """Returns None if the call failed with an unforeseen error again."""
        report = self._try(rows, partial(self._relay.deliver, rows, token=token, in_time=in_time), first=False)
        if report is None:
            return None
        return BatchTotals(outage=report.outage, **{name: getattr(report, name) for name in OUTCOMES})

    def _try(self, rows: Sequence[OutboxRow], call: Callable[[], T], *, first: bool) -> T | None:
        """Returns None if the call failed with an unforeseen error."""
        try:
            return call()
        except OutboxError:
            raise
        except Exception:  # the boundary to adapters, which are foreign code: see the module's first lines
            # One stack trace a batch: if every call fails, stack traces must not fill the log.
            logger.exception("delivery_defect", exc_info=first, extra={"message_ids": [row.id for row in rows]})
            return None

    def _put_off(self, rows: Sequence[OutboxRow], *, token: str, defects: int) -> BatchTotals:
        """Postpone each row by its own backoff; few statements, since few numbers of attempts differ."""
        alike: defaultdict[tuple[MessageTable | None, int], list[str]] = defaultdict(list)
        for row in rows:
            alike[(row.table, self._policy.backoff.delay_ms(row.attempts))].append(row.id)
        for (table, delay_ms), ids in alike.items():
            store, delay_us = self._store.at(table), self._spread_us(delay_ms)
            with database_errors(self._engine.url), self._engine.begin() as connection:
                store.reschedule(connection, ids, token=token, delay_us=delay_us, error=UNFORESEEN)
        return BatchTotals(retried=len(rows), defects=defects)

    def _spread_us(self, delay_ms: int) -> int:
        return int(delay_ms * 1_000 * (1 + self._random.random() / 4))


def _parted(rows: Sequence[OutboxRow]) -> list[Sequence[OutboxRow]]:
    middle = len(rows) // 2
    return [rows[middle:], rows[:middle]] if middle else [rows]


def _word(decision: Decision) -> str:
    match decision:
        case Acceptance():
            return "accepted"
        case Retry():
            return "retried"
        case Hold():
            return "held"
        case Park():
            return "parked"
        case _:
            assert_never(decision)
