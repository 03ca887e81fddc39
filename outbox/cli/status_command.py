"""Command `outbox status`: prints the state of an outbox, as a table or as JSON. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, Engine
from sqlalchemy.engine import Dialect

from outbox.admin.source_owners import SourceOwners, read_sharing
from outbox.cli.database_options import AsJson, PasswordFile, Schema, Url
from outbox.migrate import schema_upgrade
from outbox.store.bounded_counts import OVERDUE_SECONDS, RETRYING_ATTEMPTS
from outbox.store.database import background_engine, database_errors, open_engine
from outbox.store.database_identity import refuse_stranger
from outbox.store.database_url import database_url
from outbox.store.message_table import Backlog, MessageStore
from outbox.store.schema import message_table_names
from outbox.store.table_placement import table_namespace, tables_missing
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Inspectable, Inspection, Weakness
from outbox_core.messages.connect import connect
from outbox_core.runtime.terminal_text import escaped

app: typer.Typer = typer.Typer()

INSTANCES_SHOWN_MAX: Final = 50
UNSERVED_SHOWN_MAX: Final = 10
COUNTED_ROWS_MAX: Final = 100_000
"""The limit of counted rows in one table; more are shown as `100,000+`."""


@app.callback(invoke_without_command=True)
def status(
    url: Url,
    schema: Schema = None,
    password_file: PasswordFile = None,
    overdue_seconds: Annotated[
        float, typer.Option("--overdue-seconds", help="Older than this is overdue: exit status 1.")
    ] = OVERDUE_SECONDS,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            envvar="OUTBOX_BROKER__URL",
            help="Broker of the outbox: inspect its server, or ask whether it can serve (ours).",
        ),
    ] = None,
    topics: Annotated[list[str] | None, typer.Option("--topic", help="With --broker: inspect this topic.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of an outbox.

    Exit status 1 when a message is overdue, parked, or was refused for now seven times or more (retrying), the tables
    are not up to date, or the broker's server is down or set weaker than its adapter promises.

    Example: outbox status --url mysql+pymysql://app@db/shop

    Example: outbox status --url mysql+pymysql://app@db/shop --broker kafka://k1:9092,k2:9092 --topic paid
    """
    engine = open_engine(database_url(url, password_file=password_file))
    try:
        state = _state(engine, schema=schema, inspection=None if broker is None else _inspection(broker, topics or []))
    finally:
        engine.dispose()
    reasons = state.reasons(overdue_seconds=overdue_seconds)
    if as_json:
        typer.echo(json.dumps({**state.figures(), "ok": not reasons, "reasons": reasons}))
    else:
        _print(state)
        for reason in reasons:
            typer.echo(escaped(f"not ok: {reason}"))
    raise typer.Exit(1 if reasons else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state of an outbox: of each message table, of its compensators and its broker's server."""

    tables: Mapping[str, Backlog]
    sharing: SourceOwners | None
    revision: str | None
    newest_revision: str | None
    inspection: Inspection | None

    @property
    def total(self) -> Backlog:
        """Returns the sum over all tables."""
        tables = self.tables.values()
        return Backlog(
            pending=sum(backlog.pending for backlog in tables),
            due=sum(backlog.due for backlog in tables),
            retrying=sum(backlog.retrying for backlog in tables),
            parked=sum(backlog.parked for backlog in tables),
            oldest_due_age_us=max((backlog.oldest_due_age_us for backlog in tables), default=0),
        )

    def reasons(self, *, overdue_seconds: float) -> list[str]:
        """Returns why an operator needs to act, with what to do; empty if nobody needs to."""
        total, age_seconds = self.total, self.total.oldest_due_age_us / 1_000_000
        weaknesses = 0 if self.inspection is None else len(self.inspection.weaknesses)
        is_reason = {
            f"the oldest message waits for {age_seconds:,.1f} s since it was committed or due, more than "
            f"{overdue_seconds:g} s: is a compensator running, and its broker up? Why each waits: outbox messages "
            "list": age_seconds > overdue_seconds,
            f"{total.retrying:,} retrying: the broker refused each for now, {RETRYING_ATTEMPTS} times or more (about a "
            "minute). Why: outbox messages list": total.retrying > 0,
            f"{total.parked:,} parked, which nothing sends: outbox messages list --state parked": total.parked > 0,
            f"the tables are at revision {self.revision or 'none'}, not {self.newest_revision}: outbox db upgrade": (
                self.revision != self.newest_revision
            ),
            f"the broker: {weaknesses:,} to look at, above": weaknesses > 0,
        }
        return [reason for reason, holds in is_reason.items() if holds]

    def figures(self) -> dict[str, Any]:
        """Returns the state for JSON."""
        figures: dict[str, Any] = {
            **asdict(self.total),
            "revision": self.revision,
            "newest_revision": self.newest_revision,
            "tables": {name: asdict(backlog) for name, backlog in self.tables.items()},
            "compensators": asdict(self.sharing) if self.sharing else None,
        }
        if self.inspection is not None:
            figures["broker"] = msgspec.to_builtins(self.inspection)
        return figures


def _state(engine: Engine, *, schema: str | None, inspection: Inspection | None) -> _State:
    background = background_engine(engine)
    try:
        with database_errors(background.url), background.connect() as connection:
            return _State(
                tables=_backlogs(connection, dialect=engine.dialect, schema=schema),
                sharing=read_sharing(connection, dialect=engine.dialect, schema=schema),
                revision=schema_upgrade.current(connection, schema=schema),
                newest_revision=schema_upgrade.head(),
                inspection=inspection,
            )
    finally:
        background.dispose()


def _inspection(url: str, topics: Sequence[str]) -> Inspection | None:
    """Inspects the broker's server; returns None if the adapter does not support it."""
    broker = connect(url)
    try:
        return broker.inspect(topics) if isinstance(broker, Inspectable) else None
    except BrokerError as error:
        failed = Weakness(
            subject="broker", problem=f"cannot be inspected: {error}", cure="check --broker and its server"
        )
        return Inspection(product="unknown", version="", weaknesses=(failed,))
    finally:
        broker.close()


def _print_inspection(inspection: Inspection) -> None:
    typer.echo(escaped(f"broker: {inspection.product} {inspection.version}".rstrip()))
    if inspection.roles == ():
        typer.echo("  it asks for a token, and none was given: whether it takes messages is not known")
    for weakness in inspection.weaknesses:
        typer.echo(escaped(f"  weak: {weakness}"))


def _backlogs(connection: Connection, *, dialect: Dialect, schema: str | None) -> dict[str, Backlog]:
    """Returns the backlog of each message table of the schema. Raises SchemaMissing if there is none."""
    names = message_table_names(connection, table_namespace(dialect, schema))
    if not names:
        raise tables_missing(connection, schema)
    refuse_stranger(connection, dialect, schema)
    return {
        name: MessageStore(dialect=dialect, schema=schema, table=name).backlog(connection, rows_max=COUNTED_ROWS_MAX)
        for name in names
    }


def _print(state: _State) -> None:
    _print_backlogs(state.tables, state.total)
    if state.sharing is not None:
        _print_sharing(state.sharing)
    typer.echo(escaped(f"tables: {len(state.tables):,} at revision {state.revision or 'none'}"))
    if state.inspection is not None:
        _print_inspection(state.inspection)


def _print_backlogs(tables: Mapping[str, Backlog], total: Backlog) -> None:
    """Prints the tables that have rows, and the sum."""
    output_table = Table(
        "table", *("waiting", "due", "oldest wanted for", "retrying", "parked"), show_footer=len(tables) > 1
    )
    for column in output_table.columns[1:]:
        column.justify = "right"
    busy = {name: backlog for name, backlog in tables.items() if backlog.pending or backlog.parked or len(tables) == 1}
    for name, backlog in busy.items():
        output_table.add_row(name, *_cells(backlog))
    is_cut = any(COUNTED_ROWS_MAX in (backlog.pending, backlog.due, backlog.parked) for backlog in tables.values())
    for column, text in zip(
        output_table.columns, ("all" + (", at least" if is_cut else ""), *_cells(total)), strict=True
    ):
        column.footer = text
    Console().print(output_table)


def _print_sharing(sharing: SourceOwners) -> None:
    """Prints the compensators that share sources by leases."""
    output_table = Table("compensator", "zone", "lives for", "sources")
    for instance in sharing.instances[:INSTANCES_SHOWN_MAX]:
        cells = (instance.id, instance.zone or "", f"{instance.age_us / 1_000_000:,.0f} s", f"{instance.sources:,}")
        output_table.add_row(*(Text(escaped(cell)) for cell in cells))
    Console().print(output_table)
    if sharing.unserved:
        names = ", ".join(sharing.unserved[:UNSERVED_SHOWN_MAX])
        ellipsis = ", ..." if len(sharing.unserved) > UNSERVED_SHOWN_MAX else ""
        typer.echo(escaped(f"sources without a live compensator: {len(sharing.unserved):,} ({names}{ellipsis})"))


def _cells(backlog: Backlog) -> Sequence[str]:
    age = f"{backlog.oldest_due_age_us / 1_000_000:,.1f} s" if backlog.oldest_due_age_us else "-"
    return _figure(backlog.pending), _figure(backlog.due), age, _figure(backlog.retrying), _figure(backlog.parked)


def _figure(count: int) -> str:
    return f"{count:,}+" if count == COUNTED_ROWS_MAX else f"{count:,}"
