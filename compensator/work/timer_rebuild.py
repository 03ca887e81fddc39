"""Rebuilds a timing store from the message tables, page by page; and sweeps it: adds what is missing, removes what has
no row. No thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from compensator.work.source import PendingRowReader
from outbox.store.pending_due_times import DuePosition
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.timing_port import StoredTimer, TimedRow, Timer, TimerSink, TimingStore
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_SECOND_MS: Final = 1_000
PAGE_SECONDS_MAX: Final = 5
"""The time of a page at most: a slow rate must not let the store give the slots to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """The rows of a page, and how many rows a second are read at most. `counted_rows_max`: the total of more rows is
    unknown, since counting them would take seconds.
    """

    page_rows: int = 2_000
    rows_per_second: int = 50_000
    counted_rows_max: int = 5_000_000

    @property
    def page_rows_at_rate(self) -> int:
        """The rows of a page that this rate reads in PAGE_SECONDS_MAX, at most `page_rows`."""
        return min(self.page_rows, self.rows_per_second * PAGE_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class RebuildProgress:
    """How many pending rows were read, and how many there were at the beginning; None: unknown."""

    rows: int
    total: int | None


def rebuild_timers(
    tables: PendingRowReader,
    store: TimingStore,
    slots: Sequence[int],
    *,
    options: RebuildOptions,
    clock: Clock,
    stopping: threading.Event,
    on_progress: Callable[[RebuildProgress], None] = lambda _: None,
) -> bool:
    """Add what is missing in these slots; returns whether they are complete now: False if it was stopped, if others
    rebuild them, or if it must be repeated. Whatever ends it early, the slots are free for the next one.

    Timers of all slots are added, since a scan finds rows of all. `on_progress` is called at the beginning
    and after each page. Raises BrokerError for the store; DatabaseUnavailable, SchemaMissing.
    """
    began_ms = clock.monotonic_ms()
    rebuild = store.begin_rebuild(slots)
    if not rebuild.slots:
        return False
    logger.info("timer_rebuild_began", extra={"source": tables.name, "slots": len(rebuild.slots)})
    rows = 0
    try:
        total = tables.count(rows_max=options.counted_rows_max)
        on_progress(RebuildProgress(rows, total))
        rebuild = store.begin_rebuild(rebuild.slots)  # the count may have outlasted the time that the slots were ours
        if not rebuild.slots:
            return False
        for page in added_pages(tables, store, options=options, clock=clock, stopping=stopping):
            rows += page.rows
            on_progress(RebuildProgress(rows, total))
            if not store.continue_rebuild(rebuild):
                return False
        if stopping.is_set():
            return False
        complete = store.end_rebuild(rebuild)
    finally:
        with contextlib.suppress(BrokerError):  # a store that is out has the slots for the next rebuild all the same
            store.abandon_rebuild(rebuild)
    took_ms = clock.monotonic_ms() - began_ms
    extra = {"source": tables.name, "rows": rows, "took_ms": took_ms, "complete": complete}
    logger.info("timer_rebuild_ended", extra=extra)
    return complete


@dataclass(frozen=True, slots=True)
class AddedPage:
    """How many pending rows a page had, and how many of them had no timer."""

    rows: int
    added: int


def added_pages(
    tables: PendingRowReader, store: TimerSink, *, options: RebuildOptions, clock: Clock, stopping: threading.Event
) -> Iterator[AddedPage]:
    """Add a timer for each pending row that has none, a page at a time and no faster than the rate; yields what each
    page had. Ends early once it is stopped. Raises BrokerError for the store; DatabaseUnavailable, SchemaMissing.
    """
    began_ms, rows = clock.monotonic_ms(), 0
    for page in _pages(tables, options.page_rows_at_rate):
        added = store.add(page, only_missing=True)
        rows += len(page)
        yield AddedPage(len(page), added)
        ahead_ms = rows * _SECOND_MS // options.rows_per_second - (clock.monotonic_ms() - began_ms)
        if stopping.wait(max(0, ahead_ms) / _SECOND_MS):
            return


def _pages(tables: PendingRowReader, page_rows: int) -> Iterator[Sequence[Timer]]:
    """Yields the pending rows of all tables. A row whose time moves ahead during the scan may come twice, none is left
    out: times only ever increase, but for an operator's change, which the compensator's poll finds.
    """
    for table in tables.tables():
        after = DuePosition()
        while page := tables.pending_page(table, after=after, limit=page_rows):
            after = page[-1]
            yield [Timer(TimedRow(table, position.id), -(-position.due_at_us // _SECOND_MS)) for position in page]
            if len(page) < page_rows:
                break


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
    tables: PendingRowReader, store: TimingStore, *, options: RebuildOptions, clock: Clock, stopping: threading.Event
) -> TimerSweepReport:
    """Make one pass. Safe beside workers and other sweeps. Raises BrokerError for the store; DatabaseUnavailable,
    SchemaMissing.

    Nothing depends on it: the compensator's polls send rows whose timers are missing, and a timer without a row costs a
    statement when it is due. A sweep makes the store exact again, as after a failover that lost some adds.
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


def _gone(tables: PendingRowReader, timers: Sequence[StoredTimer], *, table_names: set[str]) -> list[StoredTimer]:
    """Returns the timers of rows that are not pending: sent, withdrawn or parked. A timer is added after its row was
    committed, so a row that is not there now will not come.
    """
    by_table: defaultdict[str, list[StoredTimer]] = defaultdict(list)
    for timer in timers:
        by_table[timer.row.table].append(timer)
    gone_timers: list[StoredTimer] = []
    for table, table_timers in by_table.items():
        pending = tables.pending(table, [timer.row.id for timer in table_timers]) if table in table_names else set()
        gone_timers += [timer for timer in table_timers if timer.row.id not in pending]
    return gone_timers
