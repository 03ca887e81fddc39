"""In which waves a batch goes to the broker, so that the messages of an ordered key arrive one after the other. Pure.

A key's message goes only after the broker has taken all older ones of the key. A broker answers for each message of a
batch by itself, so two messages of one key never share a batch: the first wave has the first of each key and all that
is not ordered, the second wave the second of each key, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from outbox.store.ordering import Barrier, KeyRun
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState

HOLD_DELAY_MS_MIN: Final = 10
PARKED_DELAY_MS: Final = 30_000
"""For one that waits for a message that people must look at."""
_HOLD_STEPS: Final = 8
"""A delay is rounded up by an eighth at most: few different ones, so that many are put off by one statement."""
IN_FLIGHT_DELAY_MS: Final = 500
"""For one that waits for a message that another process is sending."""


def runs(rows: Iterable[OutboxRow], *, accepted: Mapping[str, Collection[str]]) -> dict[str, KeyRun]:
    """What there is of each ordered key in a batch; `accepted` has, by order key, ids that the broker has already, as
    far as the caller knows, though their rows still stand.
    """
    by_key: defaultdict[str, list[OutboxRow]] = defaultdict(list)
    for row in rows:
        if row.order_key is not None:
            by_key[row.order_key].append(row)
    return {
        key: KeyRun(
            max(row.order_seq or 0 for row in of_key),
            {*(row.id for row in of_key), *accepted.get(key, ())},
            of_key[-1].table,
        )
        for key, of_key in by_key.items()
    }


def waves(rows: Sequence[OutboxRow]) -> list[list[OutboxRow]]:
    """The batches to send one after the other; each keeps the order of `rows`, each key its numbers' order."""
    found: list[list[OutboxRow]] = [[]]
    places: defaultdict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row.order_seq or 0) if any(row.order_key for row in rows) else rows:
        place = 0
        if row.order_key is not None:
            place = places[row.order_key]
            places[row.order_key] += 1
        if place == len(found):
            found.append([])
        found[place].append(row)
    return found


def hold_delay_ms(barrier: Barrier) -> int:
    """How long what waits for this one is put off until somebody looks again."""
    if barrier.state is RowState.PARKED:
        return PARKED_DELAY_MS
    if barrier.leased:
        return IN_FLIGHT_DELAY_MS
    due_in_ms = max(HOLD_DELAY_MS_MIN, barrier.due_in_us // 1000 + 1)
    step_ms = max(1, (1 << (due_in_ms.bit_length() - 1)) // _HOLD_STEPS)
    return -(-due_in_ms // step_ms) * step_ms
