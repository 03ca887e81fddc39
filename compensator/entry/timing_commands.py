"""What `outbox delay serve`, `status` and `sweep` do where --store is a timing store, e.g. redis://host/?name=shop."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from compensator.core.config import CompensatorConfig, SourceTable, load
from compensator.entry.cli import run_service
from compensator.work.engines import InstanceEngines
from compensator.work.source import PendingRowReader, source_name
from compensator.work.timer_rebuild import RebuildOptions, TimerSweepReport, sweep_timers
from outbox.store.database_url import database_url
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerError, ConfigurationError
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import SlotState, SlotStatus
from outbox_core.runtime.terminal_text import escaped

SLOT_TIMERS_MAX: Final = 1_000_000
"""A sorted set of so many timers takes some 100 MB, which a cluster moves to another node in one step."""
WIDTH_OF_FILES: Final = 160
"""The columns of a table that is not printed to a terminal."""
LARGE: Final = ": give the store more slots, under another name=, before a cluster moves it"


def serve(store: str, flags: Mapping[str, Any], config: Path | None) -> None:
    """Run the compensator of one database with this store. `flags` are nested like the file."""
    run_service(load({**flags, "timing": {"store": store}}, file=config))


def status(store: str, *, as_json: bool) -> None:
    """Print what each slot holds, and who serves it. Exit status 1 where one does not answer, or where timers were lost
    and are not rebuilt yet.
    """
    timing = connect_timing(store)
    try:
        with contextlib.suppress(BrokerError):  # a server that is out: its slots say so
            timing.prepare()
        statuses = timing.statuses(range(timing.slots))
    finally:
        timing.close()
    answered = [slot_status.figures for slot_status in statuses if slot_status.figures is not None]
    complete = len(answered) == len(statuses) and all(figures.complete for figures in answered)
    largest = max(figures.timers for figures in answered)
    if as_json:
        slots = [_slot_json(slot_status) for slot_status in statuses]
        totals = {"complete": complete, "largest_slot": largest, "slot_timers_max": SLOT_TIMERS_MAX}
        typer.echo(json.dumps({**totals, "slots": slots}))
    else:
        _print_slots(statuses)
        typer.echo(
            f"largest slot: {largest:,} of at most {SLOT_TIMERS_MAX:,} timers"
            + (LARGE if largest > SLOT_TIMERS_MAX else "")
        )
    raise typer.Exit(0 if complete else 1)


def _slot_json(status: SlotStatus) -> dict[str, Any]:
    figures = status.figures
    held = {} if figures is None else {**asdict(figures), "complete": figures.complete}
    server = None if status.server is None else {**asdict(status.server), "seen_ms_ago": status.seen_ms_ago}
    return {"slot": status.slot, "answers": figures is not None, "problem": status.problem, **held, "server": server}


def _print_slots(statuses: Sequence[SlotStatus]) -> None:
    shown = Table("slot", box=None, pad_edge=False)
    for name in ("timers", "due", "next in"):
        shown.add_column(name, justify="right")
    for name in ("state", "served by"):
        shown.add_column(name, overflow="fold")
    for slot_status in statuses:
        shown.add_row(*map(escaped, _slot_cells(slot_status)))
    Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES).print(shown, markup=False)


def _slot_cells(status: SlotStatus) -> list[str]:
    figures, served_by = status.figures, _served_by(status)
    if figures is None:
        return [str(status.slot), "-", "-", "-", f"does not answer: {status.problem}", served_by]
    following = "-" if figures.next_ms is None else f"{figures.next_ms / 1_000:,.1f} s"
    return [str(status.slot), f"{figures.timers:,}", f"{figures.due:,}", following, _state(status), served_by]


def _state(status: SlotStatus) -> str:
    state = "" if status.figures is None else status.figures.state
    server = status.server
    if state is not SlotState.REBUILDING or server is None or server.rebuilt_rows is None:
        return state
    total = "an unknown number of" if server.rows_to_rebuild is None else f"{server.rows_to_rebuild:,}"
    return f"{state}, {server.rebuilt_rows:,} of {total} rows"


def _served_by(status: SlotStatus) -> str:
    server, ms = status.server, status.seen_ms_ago
    if server is None or ms is None:
        return "nobody"
    instance = f", instance {server.instance}" if server.instance else ""
    return f"process {server.process} on {server.host}{instance}, seen {ms / 1_000:.0f} s ago"


def sweep(store: str, flags: Mapping[str, Any], config: Path | None, *, as_json: bool) -> None:
    """Compare the store with its database once, and print what was added and removed. Exit status 1 where the store is
    not complete after it.
    """
    settings = load({**flags, "timing": {"store": store}}, file=config)
    report = _swept(_only_source(settings, store), settings, store)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        state = "complete" if report.complete else "being rebuilt by another process"
        typer.echo(
            f"{report.rows:,} pending rows: {report.added:,} timers were missing and added; {report.timers:,} timers: "
            f"{report.removed:,} without a pending row removed; the store is {state}"
        )
    raise typer.Exit(0 if report.complete else 1)


def _swept(table: SourceTable, settings: CompensatorConfig, store: str) -> TimerSweepReport:
    url = database_url(table.url, password_file=table.password_file)
    engines, timing = InstanceEngines(url), connect_timing(store)
    try:
        schema = table.schemas[0] if table.schemas else None
        tables = PendingRowReader(source_name(url, schema).name, schema=schema, reads=engines.reads)
        timing.prepare()
        options = RebuildOptions(rows_per_second=settings.timing.rebuild_rows_per_second)
        return sweep_timers(tables, timing, options=options, clock=SystemClock(), stopping=threading.Event())
    finally:
        timing.close()
        engines.close()


def _only_source(settings: CompensatorConfig, store: str) -> SourceTable:
    """Returns the one source that has this store: a sweep against another one would remove its timers."""
    tables = [table for table in settings.source_tables() if (table.timing or settings.timing.store) == store]
    if len(tables) != 1 or len(tables[0].schemas) > 1:
        raise ConfigurationError(
            "a timing store is of one message schema: name its database by --url, and --schema, or give it this store "
            "as `timing` of its [[compensator.sources]] in --config FILE"
        )
    return tables[0]
