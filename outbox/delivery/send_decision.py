"""The decisions on rows to be sent, and a batch whose rows are being decided. Pure: no SQL, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outbox.delivery.key_waves import IN_FLIGHT_DELAY_MS, hold_delay_ms
from outbox.store.order_table import Barrier
from outbox.store.row import OutboxRow
from outbox.store.table_placement import MessageTable
from outbox_core.messages.delivery_decision import Acceptance, Park, Retry


@dataclass(frozen=True, slots=True)
class Hold:
    """The row waits for an older message of its ordered key, or for another owner: this one's lease may be over. It is
    retried after the delay.
    """

    delay_ms: int


Decision = Acceptance | Retry | Hold | Park


@dataclass(frozen=True, slots=True)
class RowSettlement:
    """The decision to write for one row; `number` is its order key and number, if it is ordered."""

    row_id: str
    table: MessageTable | None
    number: tuple[str, int] | None
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Stop:
    """The number from which on a key's messages are held, and the delay."""

    seq: int
    delay_ms: int


class SendBatch:
    """Rows that are being sent, and the decision on each.

    After any decision but Acceptance on a message of an ordered key, the younger ones of its key are held.
    """

    def __init__(
        self,
        rows: Sequence[OutboxRow],
        barriers: Mapping[str, Barrier],
        *,
        jitter: float,
        in_time: Callable[[], bool] = lambda: True,
    ) -> None:
        """`barriers`: by order key, the oldest unsent message that another owner has to send. `jitter`, 0 to 1, is the
        jitter of this batch's delays: the same for all its rows, so that equal decisions are written together.
        `in_time`: whether another request to the broker may begin.
        """
        self.jitter = jitter
        self.in_time: Callable[[], bool] = in_time
        self._rows = {row.id: row for row in rows}
        self._decisions: dict[str, Decision] = {}
        self._stops = {key: _Stop(barrier.order_seq, hold_delay_ms(barrier)) for key, barrier in barriers.items()}

    def decide(self, row_id: str, decision: Decision) -> None:
        """Record the decision on a row."""
        self._decisions[row_id] = decision
        row = self._rows[row_id]
        if row.order_key is None or row.order_seq is None or isinstance(decision, Acceptance):
            return
        stop = self._stops.get(row.order_key)
        if stop is None or row.order_seq < stop.seq:
            delay_ms = decision.delay_ms if isinstance(decision, Retry | Hold) else IN_FLIGHT_DELAY_MS
            self._stops[row.order_key] = _Stop(row.order_seq, delay_ms)

    def hold(self, ids: Iterable[str]) -> None:
        """Record that these rows are not sent by this owner any more."""
        for row_id in ids:
            self.decide(row_id, Hold(IN_FLIGHT_DELAY_MS))

    def is_ordered(self, row_id: str) -> bool:
        """Returns whether the row has an ordered key."""
        return self._rows[row_id].order_key is not None

    def free(self, rows: Iterable[OutboxRow]) -> list[OutboxRow]:
        """Returns the rows that may be sent now; the others are decided: held behind an older message of their key."""
        going: list[OutboxRow] = []
        for row in rows:
            stop = None if row.order_key is None else self._stops.get(row.order_key)
            if stop is None or (row.order_seq or 0) < stop.seq:
                going.append(row)
            else:
                self.decide(row.id, Hold(stop.delay_ms))
        return going

    def undecided(self, ids: Iterable[str]) -> list[str]:
        """Returns the ids without a decision."""
        return [row_id for row_id in ids if row_id not in self._decisions]

    def settlements(self) -> list[RowSettlement]:
        """Returns the settlement of each row. Every row must have a decision."""
        return [_settlement(row, self._decisions[row.id]) for row in self._rows.values()]


def _settlement(row: OutboxRow, decision: Decision) -> RowSettlement:
    key_and_number = None if row.order_key is None or row.order_seq is None else (row.order_key, row.order_seq)
    return RowSettlement(row.id, row.table, key_and_number, decision)
