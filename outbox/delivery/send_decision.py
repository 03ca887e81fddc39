"""What may become of a row that was to be sent, and a batch while that is being decided. Pure: no SQL, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outbox.delivery.key_waves import IN_FLIGHT_DELAY_MS, hold_delay_ms
from outbox.store.ordering import Barrier
from outbox.store.row import OutboxRow
from outbox.store.table_placement import MessageTable


@dataclass(frozen=True, slots=True)
class Accepted:
    """The broker has it (or had it already): the row may go. `outcome` is the broker's own word."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: due again after the delay. However often that happens, what is unsent is never given up.

    `tried` is False where the row was not at fault - the broker was out - and no attempt is to be counted.
    """

    delay_ms: int
    error: str
    tried: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """Not yet: an older message of its ordered key goes first. Looked at again after the delay."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Park:
    """Never, as it is: set aside with the reason, for people to look at."""

    error: str


Decision = Accepted | Retry | Hold | Park


@dataclass(frozen=True, slots=True)
class RowSettlement:
    """What is to be written down about one row; `number` is its order key and number, where it has some."""

    row_id: str
    table: MessageTable | None
    number: tuple[str, int] | None
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Stop:
    """From which number on a key's messages are held, and for how long."""

    seq: int
    delay_ms: int


class SendBatch:
    """Rows on their way to the broker, and what has been decided about each.

    Once a message of an ordered key is decided otherwise than accepted, the younger ones of its key are held.
    """

    def __init__(self, rows: Sequence[OutboxRow], barriers: Mapping[str, Barrier], *, luck: float) -> None:
        """`barriers`: by order key, the oldest unsent message that is in other hands. `luck`, 0 to 1, spreads this
        batch's delays: all of its rows by the same share, so that those that are alike are written down together.
        """
        self.luck = luck
        self._rows = {row.id: row for row in rows}
        self._decisions: dict[str, Decision] = {}
        self._stops = {key: _Stop(barrier.order_seq, hold_delay_ms(barrier)) for key, barrier in barriers.items()}

    def decide(self, row_id: str, decision: Decision) -> None:
        """Say what becomes of a row."""
        self._decisions[row_id] = decision
        row = self._rows[row_id]
        if row.order_key is None or row.order_seq is None or isinstance(decision, Accepted):
            return
        stop = self._stops.get(row.order_key)
        if stop is None or row.order_seq < stop.seq:
            delay_ms = decision.delay_ms if isinstance(decision, Retry | Hold) else IN_FLIGHT_DELAY_MS
            self._stops[row.order_key] = _Stop(row.order_seq, delay_ms)

    def is_ordered(self, row_id: str) -> bool:
        """Whether the row is of an ordered key."""
        return self._rows[row_id].order_key is not None

    def free(self, rows: Iterable[OutboxRow]) -> list[OutboxRow]:
        """Those of the rows that may go now; the others are decided: held behind an older message of their key."""
        going: list[OutboxRow] = []
        for row in rows:
            stop = None if row.order_key is None else self._stops.get(row.order_key)
            if stop is None or (row.order_seq or 0) < stop.seq:
                going.append(row)
            else:
                self.decide(row.id, Hold(stop.delay_ms))
        return going

    def undecided(self, ids: Iterable[str]) -> list[str]:
        """Those of the ids about which nothing has been said."""
        return [row_id for row_id in ids if row_id not in self._decisions]

    def settlements(self) -> list[RowSettlement]:
        """What is to be written down, row by row. Every row must have been decided."""
        return [_settlement(row, self._decisions[row.id]) for row in self._rows.values()]


def _settlement(row: OutboxRow, decision: Decision) -> RowSettlement:
    number = None if row.order_key is None or row.order_seq is None else (row.order_key, row.order_seq)
    return RowSettlement(row.id, row.table, number, decision)
