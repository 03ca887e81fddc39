"""All journeys in the default place, and with names of any characters, of the business's database and of a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, MetaData, create_engine, make_url
from sqlalchemy.orm import Session

from compensator.core.config import load
from compensator.entry.composition import wire
from outbox import Inbox, Outbox
from outbox.alembic import include_object
from outbox.migrate import upgrade
from outbox_core import SystemClock
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from spark_reconcile.sources.sql_statements import InputKind, outbox_statements
from tests.fixtures.command_line import outbox
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER

BUSINESS = "shop_of_names"
NAMES = ["sh%sp", "SHOP", "a :b?`c.ö%%d"]
"""What a statement would format, what a server may fold, and all other characters that anything quotes or splits at."""
TABLES = ["message", "message_0000", "message_0001"]


@dataclass(frozen=True, slots=True)
class Named:
    """A business's database, and the schema that it names; None: the default place."""

    server: LocalServer
    business: str
    schema: str | None
    closing: ExitStack

    @property
    def url(self) -> str:
        return make_url(self.server.url).set(database=self.business).render_as_string(hide_password=False)

    @property
    def arguments(self) -> list[str]:
        """Where it is, for commands."""
        return ["--url", self.url, *([] if self.schema is None else ["--schema", self.schema])]

    @property
    def begin(self) -> str:
        """What stands before a table's name."""
        return f"{quoted(self.business)}.outbox_" if self.schema is None else f"{quoted(self.schema)}."

    def engine(self) -> Engine:
        engine = create_engine(self.url)
        self.closing.callback(engine.dispose)
        return engine

    def count(self, *tables: str) -> int:
        return sum(int(self.server.execute(f"SELECT COUNT(*) FROM {self.begin}{name}")[0][0]) for name in tables)

    def run(self, *arguments: str) -> str:
        """What a command prints."""
        done = outbox(*arguments, *self.arguments)
        assert done.returncode in (0, 1), done.stdout
        return done.stdout


def quoted(name: str) -> str:
    doubled = name.replace("`", "``")
    return f"`{doubled}`"


PLACES = [
    pytest.param(BUSINESS, None, id="default"),
    # SQLAlchemy 2.0 reads a `?` in the text of a URL as its end, however it wrote it.
    *(pytest.param(name.replace("?", ""), None, id=f"business {number}") for number, name in enumerate(NAMES)),
    *(pytest.param(BUSINESS, name, id=f"schema {number}") for number, name in enumerate(NAMES)),
]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """What is to be closed at the end of a test."""
    with ExitStack() as opened:
        yield opened


@pytest.mark.parametrize(("business", "schema"), PLACES)
def test_all_journeys_run_in_any_place(
    mysql_like_of_module: LocalServer, closing: ExitStack, tmp_path: Path, business: str, schema: str | None
) -> None:
    place = Named(mysql_like_of_module, business, schema, closing)
    for name in {business, schema} - {None}:
        closing.callback(mysql_like_of_module.execute, f"DROP DATABASE IF EXISTS {quoted(str(name))}")
    mysql_like_of_module.execute(f"CREATE DATABASE {quoted(business)}")

    for _ in range(2):
        upgrade(place.url, schema=schema, tables=2)
    publish_and_send(place)
    leave(place)
    look(place)
    read(place)
    compensate(place, tmp_path)
    handle(place)
    lease_and_purge(place)
    grant(place)
    leave_alone(place)


def publish(place: Named, box: Outbox, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        for topic in ("plain", "ordered"):
            box.publish(topic, "", key="k", session=session)


def publish_and_send(place: Named) -> None:
    engine, broker = place.engine(), RecordingBroker()
    box = Outbox(engine, broker=broker, schema=place.schema, tables=2, ordered={"ordered"}, sender=BUSY_LIMITS)
    publish(place, box, engine)
    assert box.close()
    assert sorted(message.topic for message in broker.stored) == ["ordered", "plain"]
    assert place.count("archive") == 2


def leave(place: Named) -> None:
    """Rows that nobody sends, as after a crash, written by another engine's sessions."""
    box = Outbox(
        place.engine(), broker=RecordingBroker(), schema=place.schema, tables=2, ordered={"ordered"}, sender=NO_SENDER
    )
    publish(place, box, place.engine())
    box.close()
    assert place.count(*TABLES) == 2
    for name in TABLES:
        place.server.execute(f"UPDATE {place.begin}{name} SET due_at_us = 1, token = NULL")


def look(place: Named) -> None:
    """What operators ask and do."""
    assert json.loads(place.run("status", "--json"))["pending"] == 2
    assert place.run("messages", "list", "--json").count('"topic"') == 2
    assert json.loads(place.run("messages", "park", "--all", "--yes", "--json"))["changed"] == 2
    assert json.loads(place.run("messages", "retry", "--all", "--yes", "--json"))["changed"] == 2
    assert place.run("db", "current").strip() != "none"
    assert "at revision" in place.run("db", "upgrade")


def read(place: Named) -> None:
    """What the proof reads."""
    with reading(DatabaseAddress.of(place.url)) as reader:
        found = [
            (one.input_kind, len(reader.rows(f"SELECT id FROM {one.table} WHERE id <> ?", ("%?",))))
            for one in outbox_statements(reader, schema=reader.address.schema_of(place.schema))
        ]
    assert sum(rows for input_kind, rows in found if input_kind is InputKind.OUTBOX) == 2
    assert sum(rows for input_kind, rows in found if input_kind is InputKind.ARCHIVE) == 2


def compensate(place: Named, folder: Path) -> None:
    place.run("compensator", "once", "--broker", f"embedded:{folder}/broker")
    assert (place.count(*TABLES), place.count("archive"), place.count("order_queue")) == (0, 4, 0)


def handle(place: Named) -> None:
    handled: list[int] = []
    engine = place.engine()
    for _ in range(2):
        with Session(engine) as session, session.begin():
            inbox = Inbox(engine, schema=place.schema)
            inbox.handle(session, "m", "group", lambda _session: handled.append(1), topic="t")
    assert (handled, place.count("inbox")) == ([1], 1)


def lease_and_purge(place: Named) -> None:
    database = {"url": place.url, "schemas": [] if place.schema is None else [place.schema]}
    chosen = {"leases": True, "archive_days": 1}
    options = {"database": database, "broker": {"url": "memory://"}, "compensator": chosen}
    parts = wire(load(options, file=None), clock=SystemClock())
    place.closing.callback(parts.close)
    [source] = parts.sources
    place.server.execute(f"UPDATE {place.begin}archive SET sent_at_us = 1 WHERE topic = 'plain'")
    parts.assignment.beat([source.source_name])
    assert source.counts().pending == 0
    assert source.retention is not None
    assert source.retention.run().archive_rows == 2
    assert place.server.execute(f"SELECT source FROM {place.begin}compensator_lease") == [(source.name,)]


def grant(place: Named) -> None:
    for role in ("app", "compensator", "reconciliation", "migrate"):
        printed = place.run("db", "grants", "--role", role, "--user", "somebody").splitlines()
        place.server.execute("CREATE USER somebody", *(statement.rstrip(";") for statement in printed))
        place.server.execute("DROP USER somebody")
        assert len(printed) >= 1


def leave_alone(place: Named) -> None:
    """A business's autogenerate finds nothing of ours to drop."""
    with place.engine().connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": include_object})
        assert compare_metadata(context, MetaData()) == []
