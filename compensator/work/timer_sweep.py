"""Sweeps a timing store: one pass adds the timers that are missing, and removes those whose row is gone. No thread.

Nothing depends on it: the compensator's polls send rows whose timers are missing, and a timer without a row costs a
statement when it is due. A sweep makes the store exact again, as after a failover that lost some adds.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from compensator.work.pending_row_reader import PendingRowReader
from compensator.work.timer_rebuild import RebuildOptions, RebuiltStore, added_pages, rebuild_timers
from outbox_core.common.clock import Clock
from outbox_core.messages.timing_port import PlacedTimer, TimerScan


class SweptStore(RebuiltStore, TimerScan, Protocol):
    """What a sweep needs of a timing store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSweepReport:
    """Pending rows that were read, timers that were added for them; timers that were listed, and those of them that
    were removed. `complete`: no slot has to be rebuilt; `stopped`: the pass did not come to its end.
    """

    rows: int
    added: int
    timers: int
    removed: int
    complete: bool
    stopped: bool


def sweep_timers(
    tables: PendingRowReader, store: SweptStore, *, options: RebuildOptions, clock: Clock, stopping: threading.Event
) -> TimerSweepReport:
    """Make one pass. Safe beside workers and other sweeps. Raises BrokerError for the store; DatabaseUnavailable,
    SchemaMissing.
    """
    rows = added = 0
    for page in added_pages(tables, store, options=options, clock=clock, stopping=stopping):
        rows += page.rows
        added += page.added
    rebuild_timers(tables, store, range(store.slots), options=options, clock=clock, stopping=stopping)
    timers = removed = 0
    table_names = set(tables.tables())
    for slot in range(store.slots):
        cursor: int | None = 0
        while cursor is not None and not stopping.is_set():
            page_of_slot = store.list_timers(slot, cursor=cursor, limit=options.page_rows)
            cursor = page_of_slot.next_cursor
            timers += len(page_of_slot.timers)
            removed += store.remove_timers(slot, _gone(tables, page_of_slot.timers, table_names=table_names))
    complete = all(slot_figures.complete for slot_figures in store.figures())
    return TimerSweepReport(
        rows=rows, added=added, timers=timers, removed=removed, complete=complete, stopped=stopping.is_set()
    )


def _gone(tables: PendingRowReader, timers: Sequence[PlacedTimer], *, table_names: set[str]) -> list[PlacedTimer]:
    """Returns the timers of rows that are not pending: sent, withdrawn or parked. A timer is added after its row was
    committed, so a row that is not there now will not come.
    """
    by_table: defaultdict[str, list[PlacedTimer]] = defaultdict(list)
    for timer in timers:
        by_table[timer.row.table].append(timer)
    gone_timers: list[PlacedTimer] = []
    for table, table_timers in by_table.items():
        pending = tables.pending(table, [timer.row.id for timer in table_timers]) if table in table_names else set()
        gone_timers += [timer for timer in table_timers if timer.row.id not in pending]
    return gone_timers
