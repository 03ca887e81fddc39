"""`outbox messages list|retry|park|discard`: rows of the message table, for people. Bodies are never shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection

from messaging.errors import UsageError
from outbox.database import background_engine, database_errors, open_engine
from outbox.desk import MessageDesk
from outbox.schema import RowState

app = typer.Typer(help="Look at messages that are not sent yet, and decide about parked ones.", no_args_is_help=True)
talk = Console(stderr=True)

Url = Annotated[str, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database, e.g. mysql+pymysql://u@h/d.")]
Schema = Annotated[str | None, typer.Option("--schema", help="Schema of the outbox tables (MySQL; default: outbox).")]
Ids = Annotated[list[str], typer.Argument(help="Message ids.")]


@app.command("list")
def list_messages(
    url: Url,
    schema: Schema = None,
    state: Annotated[RowState | None, typer.Option("--state", help="Only rows in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List unsent messages, the longest due first.

    Example: outbox messages list --url sqlite:///shop.db --state parked
    """
    with _desk(url, schema) as (desk, connection):
        found = desk.list(connection, state=state, limit=limit)
    if as_json:
        for row in found:
            typer.echo(json.dumps(row))
        return
    table = Table("id", "topic", "key", "state", "attempts", "due in s", "last error")
    for row in found:
        due_seconds = f"{row['due_in_us'] / 1_000_000:.1f}"
        table.add_row(
            row["id"],
            row["topic"],
            row["key"] or "",
            row["state"],
            str(row["attempts"]),
            due_seconds,
            row["last_error"] or "",
        )
    Console().print(table)


@app.command()
def retry(ids: Ids, url: Url, schema: Schema = None) -> None:
    """Make messages due now; parked ones are taken up again."""
    _change(url, schema, ids, "retry")


@app.command()
def park(ids: Ids, url: Url, schema: Schema = None) -> None:
    """Set messages aside: nothing sends them until `retry`."""
    _change(url, schema, ids, "park")


@app.command()
def discard(
    ids: Ids,
    url: Url,
    schema: Schema = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask. What is discarded is never sent.")] = False,
) -> None:
    """Delete parked messages for good. Only parked ones: what might still be sent is not deleted."""
    if not yes and not typer.confirm(f"Delete {len(ids)} message(s)? They will never be sent."):
        raise UsageError("nothing was deleted")
    _change(url, schema, ids, "discard")


def _change(url: str, schema: str | None, ids: list[str], what: str) -> None:
    with _desk(url, schema) as (desk, connection):
        changed: int = getattr(desk, what)(connection, ids)
    typer.echo(f"{what}: {changed} of {len(ids)}")
    raise typer.Exit(0 if changed == len(ids) else 1)


@contextmanager
def _desk(url: str, schema: str | None) -> Iterator[tuple[MessageDesk, Connection]]:
    engine: Any = open_engine(url)
    background = background_engine(engine)
    try:
        with database_errors(background.url), background.begin() as connection:
            yield MessageDesk(dialect=engine.dialect, schema=schema), connection
    finally:
        background.dispose()
        engine.dispose()
