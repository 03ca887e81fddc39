"""Decides what becomes of timers that were taken. Pure: no timing store, no database.

A timer is a hint about a row, which alone says what is true. A row that was claimed is sent, one that is gone (sent,
withdrawn, parked) needs no timer, and one that is due later keeps its timer, at the row's time. So a timer that was
lost, repeated, early or late costs a statement, and a row is sent by whom claimed it (decision 102).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from outbox.store.row import OutboxRow
from outbox_core.messages.timing_port import TimedRow

_MS_US: Final = 1_000


def unclaimed(rows: Sequence[TimedRow], *, claimed: Collection[str]) -> list[TimedRow]:
    """Returns the rows of which the table must say why they could not be claimed."""
    return [row for row in rows if row.id not in claimed]


def due_soon(rows: Sequence[OutboxRow], *, ahead_ms: int) -> tuple[list[OutboxRow], int]:
    """Returns claimed rows as they are once all of those are due that will be within `ahead_ms`, and in how many
    milliseconds that is. One that is due later than that stays as it is: whoever sends it puts it back.
    """
    waiting_us = [row.deliver_in_us or 0 for row in rows]
    soon_us = [us for us in waiting_us if 0 < us <= ahead_ms * _MS_US]
    ready = [
        msgspec.structs.replace(row, deliver_in_us=0) if 0 < us <= ahead_ms * _MS_US else row
        for row, us in zip(rows, waiting_us, strict=True)
    ]
    return ready, -(-max(soon_us, default=0) // _MS_US)


def later_ms(rows: Sequence[TimedRow], *, due_in_us: Mapping[str, int]) -> dict[TimedRow, int]:
    """Returns in how many milliseconds the timers of unclaimed rows are due again; those that are left out are removed.

    `due_in_us`: of those of them that are pending. They are due later: their time was moved, another owner has them, or
    the store's clock is ahead of the database's. The new times are relative, so that two clocks need not agree.
    """
    return {row: max(1, -(-due_in_us[row.id] // _MS_US)) for row in rows if row.id in due_in_us}
