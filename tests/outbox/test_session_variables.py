"""Session variables of a server that would break our statements: each alone, and all of them together.

On connections of our own they are pinned. On the business's none is set, and our statements there depend on none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from compensator.retention.retention import Retention, RetentionOptions
from compensator.work.engines import InstanceEngines
from outbox import Inbox, Outbox
from outbox.consumers.inbox_table import InboxStore
from outbox.migrate import upgrade
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import background_engine
from outbox.store.order_table import OrderStore
from outbox_core.messages.timing_port import Timer
from tests.fixtures.command_line import outbox
from tests.fixtures.databases import Database
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER

WAIT_SECONDS = 120
BOTH: dict[str, object] = {
    "sql_safe_updates": 1,
    "sql_select_limit": 1,
    "max_join_size": 1,
    "completion_type": 1,
    "foreign_key_checks": 0,
    "unique_checks": 0,
    "max_sort_length": 64,
    "lc_messages": "de_DE",
    "time_zone": "+13:00",
    "net_write_timeout": 1,
    "net_read_timeout": 1,
    "default_storage_engine": "MEMORY",
    "innodb_lock_wait_timeout": 1,
    "lock_wait_timeout": 1,
    "group_concat_max_len": 4,
    "div_precision_increment": 0,
    "character_set_connection": "latin1",
    "sql_mode": "PAD_CHAR_TO_FULL_LENGTH,NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT,IGNORE_SPACE,"
    "HIGH_NOT_PRECEDENCE,ONLY_FULL_GROUP_BY,NO_UNSIGNED_SUBTRACTION,NO_AUTO_VALUE_ON_ZERO",
}
"""By variable, a hostile value."""
MARIADB: dict[str, object] = {
    "max_statement_time": 0.0001,
    "tx_read_only": 1,
    "tx_isolation": "SERIALIZABLE",
    "in_predicate_conversion_threshold": 2,
    "optimizer_max_sel_arg_weight": 1,
    "sql_mode": f"{BOTH['sql_mode']},EMPTY_STRING_IS_NULL,SIMULTANEOUS_ASSIGNMENT",
}
MYSQL: dict[str, object] = {
    "max_execution_time": 1,
    "transaction_read_only": 1,
    "transaction_isolation": "SERIALIZABLE",
    "range_optimizer_max_mem_size": 1,
}
ONE_BY_ONE = [
    *(("mariadb", name) for name in ("completion_type", "sql_safe_updates", "sql_select_limit", *MARIADB)),
    *(("mysql", name) for name in (*MYSQL, "completion_type")),
]
"""The server, and the only variable that is hostile there: those whose effect another one could hide when all are.
What both servers have is tried on one of them.
"""
BUSINESS_MAY_NOT_HAVE: dict[str, object] = {
    "max_statement_time": 0, "tx_read_only": 0, "max_execution_time": 0, "transaction_read_only": 0,
}  # fmt: skip
"""What would fail the business's own statements, which says for itself what it wants."""
BUSINESS_ALONE: dict[str, object] = {"collation_connection": "utf16_general_ci", "sql_auto_is_null": 1}
"""What no server has as a setting that clients keep; a business's init_command may set it."""


class NoTimers:
    """A timing store that keeps nothing: rows wait in their tables."""

    def add(self, timers: Sequence[Timer], *, only_missing: bool = False) -> int:
        return len(timers)

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """A database on a server whose globals have these values, since its engines were made."""

    database: Database
    globals: Mapping[str, object]
    closing: ExitStack

    def business(self, **variables: object) -> Engine:
        """An engine as a business has it, with session variables of its own."""
        chosen = {name: value for name, value in BUSINESS_MAY_NOT_HAVE.items() if name in self.globals}
        # Before SQLAlchemy first asks: its transaction would stay read-only where a ROLLBACK begins the next one.
        first = {"init_command": assignments(chosen)} if chosen else {}
        engine = create_engine(self.database.url, connect_args=first)
        self.closing.callback(engine.dispose)
        if variables:

            @event.listens_for(engine, "connect")  # behind the SET NAMES of SQLAlchemy, which sets some
            def choose(connection: Any, _record: object) -> None:
                with connection.cursor() as cursor:
                    cursor.execute(assignments(variables))

        return engine

    def ask(self, question: str, **parameters: object) -> list[tuple[Any, ...]]:
        """The rows of a query, on a connection that no hostile value disturbs."""
        with self.closing.enter_context(ExitStack()) as closing:
            engine = self.business(
                sql_select_limit=1_000, sql_big_selects=1, sql_mode="", completion_type=0, sql_safe_updates=0
            )
            closing.callback(engine.dispose)
            # SERIALIZABLE locks what a query reads, in another order than the sender that settles meanwhile.
            with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
                result = connection.execute(text(question.replace("{s}", self.database.schema or "")), parameters)
                return [tuple(row) for row in result] if result.returns_rows else []

    def wait_for(self, question: str, answer: list[tuple[Any, ...]]) -> None:
        """Ask until this is the answer."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := self.ask(question)) != answer:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """What is to be closed at the end of a test."""
    with ExitStack() as opened:
        yield opened


def hostile(server: LocalServer, closing: ExitStack, variables: Mapping[str, object]) -> Hostile:
    """Give a server these globals until the test ends; a fresh database on it."""
    database = closing.enter_context(server.fresh_database())
    before = {name: server.execute(f"SELECT @@GLOBAL.{name}")[0][0] for name in variables}
    closing.callback(lambda: set_globals(server, before))
    set_globals(server, variables)
    return Hostile(database, variables, closing)


def assignments(variables: Mapping[str, object]) -> str:
    """The statement that sets these in a session."""
    return "SET " + ", ".join(f"SESSION {name} = {value!r}" for name, value in variables.items())


def set_globals(server: LocalServer, variables: Mapping[str, object]) -> None:
    for name, value in variables.items():
        server.execute("SET SESSION sql_mode = ''", f"SET GLOBAL {name} = {value!r}")


def values_of(server: LocalServer) -> Mapping[str, object]:
    """All hostile values of a kind of server."""
    return BOTH | (MARIADB if server.name == "mariadb" else MYSQL)


def run_all_journeys(place: Hostile, folder: Path, **variables: object) -> None:
    """Upgrade, publish in order and not, send, park, compensate, look, retry, withdraw, mark, purge."""
    url, schema = place.database.url, place.database.schema
    assert schema is not None
    upgrade(url, schema=schema, tables=3)
    upgrade(url, schema=schema, tables=3)
    place.ask("CREATE TABLE payment (id BIGINT PRIMARY KEY, note VARCHAR(64)) ENGINE=InnoDB")
    publish_and_send(place, place.business(**variables))
    compensate(place, place.business(**variables), folder)
    withdraw(place, place.business(**variables))
    mark(place, place.business(**variables))
    purge(place)


def publish_and_send(place: Hostile, engine: Engine) -> None:
    """What is published is sent at once, in order, and settled; what the broker refuses is parked."""
    broker = RecordingBroker()
    broker.rejects["refused"] = 'it\'s \\ "refused"'
    box = Outbox(engine, broker=broker, schema=place.database.schema, tables=3, ordered={"o"}, sender=BUSY_LIMITS)
    place.closing.callback(box.close, timeout_ms=5_000)
    for start in (0, 20):
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO payment VALUES (:id, '')"), {"id": start})
            for number in range(start, start + 20):
                box.publish("o", str(number), key=f"k{number % 4}", session=session)
                box.publish("t", f"ü'\\\" {number}", key="ключ", headers={"a": "'\\"}, session=session)
    with Session(engine) as session, session.begin():
        box.publish("t", "no", message_id="refused", session=session)
    rows = " UNION ALL ".join(f"SELECT id, state FROM {{s}}.{name}" for name in TABLES)
    place.wait_for(rows, [("refused", "parked")])
    place.wait_for("SELECT COUNT(*) FROM {s}.order_queue", [(0,)])
    assert box.close()

    assert broker.duplicates == []
    assert len(broker.stored) == 80
    by_key: dict[str | None, list[bytes]] = {}
    for message in broker.stored:
        by_key.setdefault(message.key, []).append(message.body)
    assert by_key["ключ"] == [f"ü'\\\" {number}".encode() for number in range(40)]
    assert [by_key[f"k{key}"] for key in range(4)] == [
        [str(number).encode() for number in range(key, 40, 4)] for key in range(4)
    ]
    assert place.ask("SELECT COUNT(*) FROM {s}.archive") == [(80,)]


TABLES = ["message", "message_0000", "message_0001", "message_0002"]


def run(*arguments: str) -> str:
    """What a command prints."""
    done = outbox(*arguments)
    assert done.returncode in (0, 1), done.stdout
    return done.stdout


def compensate(place: Hostile, engine: Engine, folder: Path) -> None:
    """What nobody sent is claimed and sent by a pass; commands of operators find and change what is there."""
    url, schema = place.database.url, place.database.schema or ""
    box = Outbox(engine, broker=RecordingBroker(), schema=schema, tables=3, ordered={"o"}, sender=NO_SENDER)
    with Session(engine) as session, session.begin():
        for number in range(30):
            box.publish("o", str(number), key=f"k{number % 4}", session=session)
            box.publish("t", str(number), session=session)
    box.close()
    shown = json.loads(run("status", "--url", url, "--schema", schema, "--json"))
    assert (shown["pending"], shown["parked"]) == (60, 1)
    assert list(shown["tables"]) == TABLES
    granted = run("db", "grants", "--url", url, "--schema", schema, "--role", "app").replace('"', "`")
    assert [name for name in TABLES if f".`{name}`" not in granted] == []
    run("messages", "retry", "--url", url, "--schema", schema, "--all", "--yes")
    for name in TABLES:
        place.ask(f"UPDATE {{s}}.{name} SET due_at_us = 1, token = NULL")
    run("compensator", "once", "--url", url, "--schema", schema, "--broker", f"embedded:{folder}/broker")
    assert place.ask(" UNION ALL ".join(f"SELECT id FROM {{s}}.{name}" for name in TABLES)) == []
    assert place.ask("SELECT COUNT(*) FROM {s}.archive") == [(141,)]
    assert place.ask("SELECT COUNT(*) FROM {s}.order_queue") == [(0,)]


def withdraw(place: Hostile, engine: Engine) -> None:
    """A scheduled message that a table holds is withdrawn from it."""
    box = Outbox(engine, broker=RecordingBroker(), schema=place.database.schema, tables=3, timing=NoTimers())
    with Session(engine) as session, session.begin():
        message = box.publish("t", "later", delay=timedelta(days=1), session=session)
    with Session(engine) as session, session.begin():
        box.cancel(message.id, session=session)
    box.close()
    assert place.ask("SELECT outcome FROM {s}.archive WHERE outcome = 'canceled'") == [("canceled",)]
    place.ask("DELETE FROM {s}.archive WHERE outcome IN ('canceled', 'withdrawn')")


def mark(place: Hostile, engine: Engine) -> None:
    """A message is handled once."""
    inbox, handled = Inbox(engine, schema=place.database.schema), []
    for _ in range(2):
        with Session(engine) as session, session.begin():
            inbox.handle(session, "m1", "g", lambda _session: handled.append(1), topic="t")
    assert handled == [1]
    assert place.ask("SELECT COUNT(*) FROM {s}.inbox") == [(1,)]


def purge(place: Hostile) -> None:
    """What is old enough goes, and nothing else."""
    schema = place.database.schema
    place.ask("UPDATE {s}.archive SET sent_at_us = 1 WHERE topic = 't' ORDER BY id LIMIT 60")
    place.ask("UPDATE {s}.order_head SET seq = 1")
    engines = InstanceEngines(place.database.url)
    place.closing.callback(engines.close)
    dialect = engines.work.dialect
    gone = Retention(
        engine=engines.work,
        archive=ArchiveStore(dialect=dialect, schema=schema),
        inbox=InboxStore(dialect=dialect, schema=schema),
        order=OrderStore(dialect=dialect, schema=schema),
        options=RetentionOptions(archive_days=1, inbox_days=1),
    ).run()
    assert gone.archive_rows == 60
    assert place.ask("SELECT COUNT(*) FROM {s}.archive") == [(81,)]


def test_a_server_whose_variables_are_all_hostile_runs_all_journeys(
    mysql_like_of_module: LocalServer, closing: ExitStack, tmp_path: Path
) -> None:
    place = hostile(mysql_like_of_module, closing, values_of(mysql_like_of_module))

    run_all_journeys(place, tmp_path)


@pytest.mark.parametrize(
    ("mysql_like_of_module", "variable"),
    [pytest.param(*one, marks=getattr(pytest.mark, one[0])) for one in ONE_BY_ONE],
    indirect=["mysql_like_of_module"],
)
def test_a_server_with_one_hostile_variable_runs_all_journeys(
    mysql_like_of_module: LocalServer, closing: ExitStack, tmp_path: Path, variable: str
) -> None:
    place = hostile(mysql_like_of_module, closing, {variable: values_of(mysql_like_of_module)[variable]})

    run_all_journeys(place, tmp_path)


@pytest.mark.parametrize("variable", sorted(BUSINESS_ALONE))
def test_a_business_that_sets_one_hostile_variable_runs_all_journeys(
    mysql_like_of_module: LocalServer, closing: ExitStack, tmp_path: Path, variable: str
) -> None:
    place = hostile(mysql_like_of_module, closing, {})

    run_all_journeys(place, tmp_path, **{variable: BUSINESS_ALONE[variable]})


def test_what_a_listener_of_the_business_sets_is_not_left_on_connections_of_ours(
    mysql_like_of_module: LocalServer, closing: ExitStack
) -> None:
    place = hostile(mysql_like_of_module, closing, {})
    chosen = {"sql_select_limit": 1, "sql_safe_updates": 1, "unique_checks": 0, "max_sort_length": 64}
    ours = background_engine(place.business(**chosen))
    closing.callback(ours.dispose)

    with ours.connect() as connection:
        shown = dict(map(tuple[str, str], connection.exec_driver_sql("SHOW SESSION VARIABLES LIKE '%%'")))

    assert {name: shown.get(name) for name in chosen} == {
        "sql_select_limit": str(2**64 - 1), "sql_safe_updates": "OFF", "unique_checks": "ON", "max_sort_length": "1024",
    }  # fmt: skip


def test_nothing_is_set_on_the_connections_of_the_business(
    mysql_like_of_module: LocalServer, closing: ExitStack
) -> None:
    place = hostile(mysql_like_of_module, closing, values_of(mysql_like_of_module))
    upgrade(place.database.url, schema=place.database.schema)
    engine = place.business()
    variables = "SHOW SESSION VARIABLES WHERE variable_name NOT IN ('timestamp', 'rand_seed1', 'rand_seed2')"

    with engine.connect() as connection:
        connection.exec_driver_sql("SET SESSION sql_select_limit = 1000, SESSION sql_big_selects = 1")
        before = dict(map(tuple[str, str], connection.exec_driver_sql(variables)))
        connection.rollback()
        box = Outbox(engine, broker=RecordingBroker(), schema=place.database.schema, ordered={"o"})
        closing.callback(box.close)
        with Session(connection) as session, session.begin():
            box.publish("o", "1", key="k", session=session)
        after = dict(map(tuple[str, str], connection.exec_driver_sql(variables)))

    changed = {name for name in before if before[name] != after[name]}
    assert {name for name in changed if "gtid" not in name} <= {"statement_id"}  # of MySQL, which counts them
