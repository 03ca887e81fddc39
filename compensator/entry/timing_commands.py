"""What `outbox delay serve`, `status` and `sweep` do where --store is a timing store, e.g. redis://host/?name=shop."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import typer

from compensator.core.config import CompensatorConfig, SourceTable, load
from compensator.entry.cli import run_service
from compensator.work.engines import InstanceEngines
from compensator.work.pending_row_reader import TimedTables
from compensator.work.source import source_name
from compensator.work.timer_rebuild import RebuildOptions
from compensator.work.timer_sweep import TimerSweepReport, sweep_timers
from outbox.store.database_url import database_url
from outbox.store.schema import schema_for
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.connect import connect_timing

SLOT_TIMERS_MAX: Final = 1_000_000
"""A sorted set of so many timers takes some 100 MB, which a cluster moves to another node in one step."""
LARGE: Final = ": give the store more slots, under another name=, before a cluster moves it"


def serve(store: str, flags: Mapping[str, Any], config: Path | None) -> None:
    """Run the compensator of one database with this store. `flags` are nested like the file."""
    run_service(load({**flags, "timing": {"store": store}}, file=config))


def status(store: str, *, as_json: bool) -> None:
    """Print what each slot holds. Exit status 1 where timers were lost and are not rebuilt yet."""
    timing = connect_timing(store)
    try:
        timing.prepare()
        figures = timing.figures()
    finally:
        timing.close()
    complete = all(one.complete for one in figures)
    largest = max(one.timers for one in figures)
    if as_json:
        slots = [asdict(one) for one in figures]
        typer.echo(json.dumps({"complete": complete, "largest_slot": largest, "slots": slots}))
    else:
        for one in figures:
            following = "-" if one.next_ms is None else f"{one.next_ms / 1_000:,.1f} s"
            state = "complete" if one.complete else "to be rebuilt"
            typer.echo(f"slot {one.slot}: {one.timers:,} timers, {one.due:,} due, next in {following}, {state}")
        typer.echo(f"largest slot: {largest:,} timers" + (LARGE if largest > SLOT_TIMERS_MAX else ""))
    raise typer.Exit(0 if complete else 1)


def sweep(store: str, flags: Mapping[str, Any], config: Path | None, *, as_json: bool) -> None:
    """Compare the store with its database once, and print what was added and removed. Exit status 1 where the store is
    not complete after it.
    """
    chosen = load({**flags, "timing": {"store": store}}, file=config)
    report = _swept(_only_source(chosen, store), chosen, store)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        state = "complete" if report.complete else "being rebuilt by another process"
        typer.echo(
            f"{report.rows:,} pending rows: {report.added:,} timers were missing and added; {report.timers:,} timers: "
            f"{report.removed:,} without a pending row removed; the store is {state}"
        )
    raise typer.Exit(0 if report.complete else 1)


def _swept(table: SourceTable, chosen: CompensatorConfig, store: str) -> TimerSweepReport:
    url = database_url(table.url, password_file=table.password_file)
    engines, timing = InstanceEngines(url), connect_timing(store)
    try:
        schema = schema_for(engines.reads.dialect, table.schemas[0] if table.schemas else None)
        tables = TimedTables(source_name(url, schema).name, schema=schema, reads=engines.reads)
        timing.prepare()
        options = RebuildOptions(rows_per_second=chosen.timing.rebuild_rows_per_second)
        return sweep_timers(tables, timing, options=options, clock=SystemClock(), stopping=threading.Event())
    finally:
        timing.close()
        engines.close()


def _only_source(chosen: CompensatorConfig, store: str) -> SourceTable:
    """Returns the one source that has this store: a sweep against another one would remove its timers."""
    tables = [one for one in chosen.source_tables() if (one.timing or chosen.timing.store) == store]
    if len(tables) != 1 or len(tables[0].schemas) > 1:
        raise ConfigurationError(
            "a timing store is of one message schema: name its database by --url, and --schema, or give it this store "
            "as `timing` of its [[compensator.sources]] in --config FILE"
        )
    return tables[0]
