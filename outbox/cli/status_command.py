"""`outbox status`: how one outbox stands, as a table for people or as JSON. It changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection
from sqlalchemy.engine import Dialect

from outbox.admin.source_shares import Sharing, read_sharing
from outbox.migrate import schema_upgrade
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.database_url import database_url
from outbox.store.message_table import Backlog, MessageStore
from outbox.store.schema import message_table_names, schema_for
from outbox_core.common.errors import SchemaMissing

app: typer.Typer = typer.Typer()

OVERDUE_SECONDS: Final = 60.0
INSTANCES_SHOWN_MAX: Final = 50
UNSERVED_SHOWN_MAX: Final = 10
COUNTED_ROWS_MAX: Final = 100_000
"""Rows of each kind counted in one table; more is shown as `100,000+`."""


@app.callback(invoke_without_command=True)
def status(
    url: Annotated[str, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database of the outbox.")],
    schema: Annotated[
        str | None, typer.Option("--schema", help="Schema of the tables (MySQL; default: outbox).")
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            "--password-file", envvar="OUTBOX_DATABASE__PASSWORD_FILE", help="File with the database's password."
        ),
    ] = None,
    overdue_seconds: Annotated[
        float, typer.Option("--overdue-seconds", help="Older than this is overdue: exit status 1.")
    ] = OVERDUE_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how an outbox stands. Exit status 1 when a message is overdue or parked, or the tables are not up to date.

    Example: outbox status --url mysql+pymysql://app@db/shop
    """
    engine = open_engine(database_url(url, password_file=password_file))
    background = background_engine(engine)
    try:
        with database_errors(background.url), background.connect() as connection:
            tables = _backlogs(connection, dialect=engine.dialect, schema=schema)
            sharing = read_sharing(connection, dialect=engine.dialect, schema=schema)
            revision = schema_upgrade.current(connection, schema=schema)
    finally:
        background.dispose()
        engine.dispose()
    total = _total(tables)
    newest = schema_upgrade.head()
    well = total.oldest_due_age_us <= overdue_seconds * 1_000_000 and not total.parked and revision == newest
    if as_json:
        figures: dict[str, Any] = {**asdict(total), "revision": revision, "newest_revision": newest, "ok": well}
        figures["tables"] = {name: asdict(one) for name, one in tables.items()}
        typer.echo(json.dumps({**figures, "compensators": asdict(sharing) if sharing else None}))
    else:
        _print(tables, total)
        if sharing is not None:
            _print_sharing(sharing)
        hint = "" if revision == newest else "; run: outbox db upgrade"
        typer.echo(f"tables: {len(tables):,} at revision {revision}{hint}")
    raise typer.Exit(0 if well else 1)


def _backlogs(connection: Connection, *, dialect: Dialect, schema: str | None) -> dict[str, Backlog]:
    """How each message table of the schema stands. Raises SchemaMissing where there is none."""
    names = message_table_names(connection, schema_for(dialect, schema))
    if not names:
        raise SchemaMissing("there is no message table here; run: outbox db upgrade --url URL")
    return {
        name: MessageStore(dialect=dialect, schema=schema, table=name).backlog(connection, rows_max=COUNTED_ROWS_MAX)
        for name in names
    }


def _total(tables: Mapping[str, Backlog]) -> Backlog:
    return Backlog(
        pending=sum(one.pending for one in tables.values()),
        due=sum(one.due for one in tables.values()),
        parked=sum(one.parked for one in tables.values()),
        oldest_due_age_us=max((one.oldest_due_age_us for one in tables.values()), default=0),
    )


def _print(tables: Mapping[str, Backlog], total: Backlog) -> None:
    """The tables that have something in them, and the sum."""
    shown = Table("table", *("waiting", "due", "oldest due for", "parked"), show_footer=len(tables) > 1)
    for column in shown.columns[1:]:
        column.justify = "right"
    busy = {name: one for name, one in tables.items() if one.pending or one.parked or len(tables) == 1}
    for name, one in busy.items():
        shown.add_row(name, *_cells(one))
    is_cut = any(COUNTED_ROWS_MAX in (one.pending, one.due, one.parked) for one in tables.values())
    for column, text in zip(shown.columns, ("all" + (", at least" if is_cut else ""), *_cells(total)), strict=True):
        column.footer = text
    Console().print(shown)


def _print_sharing(sharing: Sharing) -> None:
    """The compensators that share sources by leases here."""
    shown = Table("compensator", "zone", "lives for", "sources")
    for one in sharing.instances[:INSTANCES_SHOWN_MAX]:
        shown.add_row(one.id, one.zone or "", f"{one.age_us / 1_000_000:,.0f} s", f"{one.sources:,}")
    Console().print(shown)
    if sharing.unserved:
        names = ", ".join(sharing.unserved[:UNSERVED_SHOWN_MAX])
        more = ", ..." if len(sharing.unserved) > UNSERVED_SHOWN_MAX else ""
        typer.echo(f"sources without a live compensator: {len(sharing.unserved):,} ({names}{more})")


def _cells(backlog: Backlog) -> tuple[str, str, str, str]:
    age = f"{backlog.oldest_due_age_us / 1_000_000:,.1f} s" if backlog.due else "-"
    return _figure(backlog.pending), _figure(backlog.due), age, _figure(backlog.parked)


def _figure(count: int) -> str:
    return f"{count:,}+" if count == COUNTED_ROWS_MAX else f"{count:,}"
