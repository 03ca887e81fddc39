"""`outbox status`: how one outbox stands, in a few lines or as JSON. It changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Final

import typer

from outbox import migrating
from outbox.database import background_engine, database_errors, open_engine
from outbox.store import MessageStore

app = typer.Typer(help="Say how an outbox stands: what waits, what is parked, how old the oldest is.")

OVERDUE_SECONDS: Final = 60.0


@app.callback(invoke_without_command=True)
def status(
    url: Annotated[str, typer.Option("--url", envvar="OUTBOX_DATABASE__URL", help="Database of the outbox.")],
    schema: Annotated[
        str | None, typer.Option("--schema", help="Schema of the tables (MySQL; default: outbox).")
    ] = None,
    overdue_seconds: Annotated[
        float, typer.Option("--overdue-seconds", help="Older than this is overdue: exit status 1.")
    ] = OVERDUE_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how an outbox stands. Exit status 1 when a message is overdue or parked, or the tables are not up to date.

    Example: outbox status --url mysql+pymysql://app@db/shop
    """
    engine = open_engine(url)
    background = background_engine(engine)
    try:
        with database_errors(background.url), background.begin() as connection:
            backlog = MessageStore(dialect=engine.dialect, schema=schema).backlog(connection)
            revision = migrating.current(connection, schema=schema)
    finally:
        background.dispose()
        engine.dispose()
    age_seconds = backlog.oldest_due_age_us / 1_000_000
    well = age_seconds <= overdue_seconds and not backlog.parked and revision == migrating.head()
    if as_json:
        typer.echo(
            json.dumps({**asdict(backlog), "revision": revision, "newest_revision": migrating.head(), "ok": well})
        )
    else:
        typer.echo(f"waiting    {backlog.pending:,}")
        typer.echo(f"due        {backlog.due:,} (the oldest for {age_seconds:,.1f} s)")
        typer.echo(f"parked     {backlog.parked:,}")
        typer.echo(
            f"tables     revision {revision}" + ("" if revision == migrating.head() else "; run: outbox db upgrade")
        )
    raise typer.Exit(0 if well else 1)
