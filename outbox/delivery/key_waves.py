"""Splits a batch into waves, so that the messages of an ordered key reach the broker one after the other. Pure.

A message is sent only after the broker has accepted all older ones of its key. A broker may accept any part of a batch,
so two messages of one key never share a batch: the first wave has the first message of each key and all unordered ones,
the second wave the second message of each key, and so on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from outbox.store.order_table import Barrier, KeyRun
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState

HOLD_DELAY_MS_MIN: Final = 10
PARKED_DELAY_MS: Final = 30_000
"""The delay of a message that waits for one that an operator must handle."""
_HOLD_STEPS: Final = 8
"""Delays are rounded up, by an eighth at most, to few different ones, so that one statement postpones many rows."""
IN_FLIGHT_DELAY_MS: Final = 500
"""The delay of a message that waits for one that another process is sending."""


def runs(rows: Iterable[OutboxRow], *, accepted: Mapping[str, Collection[str]]) -> dict[str, KeyRun]:
    """Returns the rows of a batch by ordered key; `accepted` has, by order key, ids that the broker has already
    accepted to the caller's knowledge, though their rows still exist.
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
    """Returns the batches to send in turn; each keeps the order of `rows`, and each key the order of its numbers."""
    batches: list[list[OutboxRow]] = [[]]
    next_wave_by_key: defaultdict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row.order_seq or 0) if any(row.order_key for row in rows) else rows:
        wave_index = 0
        if row.order_key is not None:
            wave_index = next_wave_by_key[row.order_key]
            next_wave_by_key[row.order_key] += 1
        if wave_index == len(batches):
            batches.append([])
        batches[wave_index].append(row)
    return batches


def hold_delay_ms(barrier: Barrier) -> int:
    """Returns the delay after which messages that wait for this barrier are retried."""
    if barrier.state is not RowState.PENDING:
        return PARKED_DELAY_MS
    if barrier.leased:
        return IN_FLIGHT_DELAY_MS
    due_in_ms = max(HOLD_DELAY_MS_MIN, barrier.due_in_us // 1000 + 1)
    step_ms = max(1, (1 << (due_in_ms.bit_length() - 1)) // _HOLD_STEPS)
    return -(-due_in_ms // step_ms) * step_ms
