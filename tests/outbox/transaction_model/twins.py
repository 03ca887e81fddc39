"""The two databases of a laboratory, with engines for pools of each size, and what strangers do to them."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.store.database import open_engine
from outbox.store.schema import outbox_tables
from tests.fixtures.databases import Database, Server, sqlite_database
from tests.outbox.shop import make_tables
from tests.outbox.transaction_model.business import STANDING_ROW, Business, Payment
from tests.outbox.transaction_model.interpreter import Side

KILLED_WITHIN_SECONDS = 30
END_SECONDS_MAX = 60
PROCEDURES = (
    "CREATE PROCEDURE does_nothing() BEGIN SELECT 1; END",
    "CREATE PROCEDURE commits() BEGIN COMMIT; END",
    "CREATE PROCEDURE rolls_back() BEGIN ROLLBACK; END",
    """CREATE PROCEDURE rolls_back_on_error() BEGIN
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; END; SIGNAL SQLSTATE '45000'; END""",
)
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mysql+asyncmy", "mysql": "mysql+asyncmy"}
_PLAIN: dict[str, Any] = {"ssl_disabled": True}
"""For PyMySQL, which reads the system's certificates for each connection: 26 ms, two fifths of a program's time."""


class LosingConnection(sqlite3.Connection):
    """A connection of SQLite that can lose the answer of its next COMMIT."""

    loses_answer = False

    def commit(self) -> None:
        super().commit()
        if self.loses_answer:
            self.loses_answer = False
            self.close()
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")


class SqliteFaults:
    """What a stranger does to a database of SQLite."""

    def __init__(self, path: str) -> None:
        self._holder = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)

    def kill(self, connection: Connection) -> None:
        """There is no server."""

    def lose_answer(self, connection: Connection) -> None:
        """See Faults."""
        driver: Any = connection.connection.driver_connection
        if isinstance(driver, LosingConnection):
            driver.loses_answer = True

    def hold_row(self) -> bool:
        """See Faults."""
        if self._holder.in_transaction:
            return False
        try:
            self._holder.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True

    def hold_message(self, message_id: str) -> None:
        """See Faults; SQLite has one lock for all."""
        self.hold_row()

    def let_go(self) -> None:
        """See Faults."""
        if self._holder.in_transaction:
            self._holder.execute("ROLLBACK")

    def close(self) -> None:
        """Close the stranger's connection."""
        self._holder.close()


class ServerFaults:
    """What a stranger does to a database of a server."""

    def __init__(self, server: Server, database: Database, *, message_table: str | None) -> None:
        """`message_table`: where messages are, on the side that has any."""
        self._message_table = message_table
        self._admin = server.connect()
        self._holder = server.connect()
        with self._holder.cursor() as cursor:
            cursor.execute(f"USE {database.business}")
            cursor.execute("SET innodb_lock_wait_timeout = 1")
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    def kill(self, connection: Connection) -> None:
        """See Faults."""
        driver: Any = connection.connection.driver_connection
        thread_id = driver.thread_id()
        with self._admin.cursor() as cursor, contextlib.suppress(pymysql.err.MySQLError):
            cursor.execute(f"KILL {thread_id}")
        deadline = time.monotonic() + KILLED_WITHIN_SECONDS
        while self._is_there(thread_id):
            assert time.monotonic() < deadline, "the server does not end a killed connection"
            time.sleep(0.001)

    def _is_there(self, thread_id: int) -> bool:
        with self._admin.cursor() as cursor:
            return bool(cursor.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {thread_id}"))

    def lose_answer(self, connection: Connection) -> None:
        """See Faults."""
        driver: Any = connection.connection.driver_connection
        if not isinstance(driver, pymysql.connections.Connection):
            return
        commit = driver.commit

        def lost() -> None:
            commit()
            driver.close()
            raise pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query")

        driver.commit = lost

    def hold_row(self) -> bool:
        """See Faults."""
        return self._hold(f"UPDATE payment SET note = 'held' WHERE id = {STANDING_ROW}")

    def hold_message(self, message_id: str) -> None:
        """See Faults: a locking read locks the gap in which the id would be."""
        if self._message_table is not None:
            self._hold(f"SELECT id FROM {self._message_table} WHERE id = '{message_id}' FOR UPDATE")

    def _hold(self, statement: str) -> bool:
        with self._holder.cursor() as cursor:
            cursor.execute("BEGIN")
            try:
                cursor.execute(statement)
            except pymysql.err.OperationalError:
                cursor.execute("ROLLBACK")
                return False
        return True

    def let_go(self) -> None:
        """See Faults."""
        with self._holder.cursor() as cursor:
            cursor.execute("ROLLBACK")

    def close(self) -> None:
        """Close the stranger's connections."""
        self._admin.close()
        self._holder.close()


class Twin:
    """One of the two databases, and its engines by the size of their pools."""

    def __init__(self, database: Database, *, server: Server | None, is_async: bool, has_messages: bool) -> None:
        make_tables(database)
        self.database = database
        self.is_async = is_async
        self.sides: dict[int, Side] = {}
        self._opened: list[Any] = []
        self.gate = threading.Event()
        """Open while nothing runs."""
        options = (
            {} if server is None else {"connect_args": {"init_command": "SET innodb_lock_wait_timeout = 5"} | _PLAIN}
        )
        self.watching: Engine = open_engine(create_engine(database.url, **options))
        """For who looks at what programs have left."""
        with self.watching.begin() as connection:
            Business.metadata.drop_all(connection)
            Business.metadata.create_all(connection)
            connection.execute(insert(Payment), {"id": STANDING_ROW, "note": ""})
            for procedure in PROCEDURES if server is not None else ():
                connection.exec_driver_sql(procedure)
        message = outbox_tables(database.namespace).message
        self.faults: Any = (
            SqliteFaults(database.business or "")
            if server is None
            else ServerFaults(server, database, message_table=str(message) if has_messages else None)
        )

    def side(self, pool_size: int) -> Side:
        """The side with a pool of this size."""
        if pool_size not in self.sides:
            self.sides[pool_size] = self._open(pool_size)
        return self.sides[pool_size]

    def prefer_own_settings(self, side: Side) -> None:
        """Have no connection wait for SQLite's lock: two transactions of one thread would wait for each other. To be
        called once an Outbox was made, whose own setting then comes before.
        """
        if self.database.name == "sqlite" and not event.contains(side.engine, "connect", _never_wait):
            event.listen(side.engine, "connect", _never_wait)

    def end_prepared(self) -> None:
        """Roll back the transactions of two phases that somebody prepared and left, once the server has seen that their
        connections are closed.
        """
        if self.database.name == "sqlite":
            return
        deadline = time.monotonic() + END_SECONDS_MAX
        # XA RECOVER begins a transaction, in which XA ROLLBACK is refused.
        with self.watching.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while prepared := connection.execute(text("XA RECOVER")).all():
                assert time.monotonic() < deadline, prepared
                for *_, xid in prepared:
                    with contextlib.suppress(DBAPIError):  # its connection has it still
                        connection.exec_driver_sql(f"XA ROLLBACK X'{xid.hex()}'")
                time.sleep(0.01)

    def close(self) -> None:
        """Close the engines of nobody else."""
        self.faults.close()
        self.watching.dispose()

    def _open(self, pool_size: int) -> Side:
        url = make_url(self.database.url)
        options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 0, "pool_timeout": 0}
        if self.database.name == "sqlite":
            options["connect_args"] = {} if self.is_async else {"factory": LosingConnection}
        else:
            seconds = 0 if self.database.name == "mariadb" else 1
            options["connect_args"] = {"init_command": f"SET innodb_lock_wait_timeout = {seconds}"}
            if not self.is_async:
                options["connect_args"] |= _PLAIN
        async_engine: AsyncEngine | None = None
        if self.is_async:
            options["pool_timeout"] = 0.01
            async_engine = create_async_engine(url.set(drivername=ASYNC_DRIVERS[self.database.name]), **options)
        side = Side(
            engine=open_engine(async_engine or create_engine(url, **options)),
            async_engine=async_engine,
            faults=self.faults,
        )
        self.prefer_own_settings(side)
        event.listen(side.engine, "connect", self._note_opened)
        event.listen(side.engine.pool, "checkout", self._hold_back)  # the sender's pool, made by it, has it as well
        return side

    def _note_opened(self, dbapi_connection: Any, _record: object) -> None:
        if not _in_background():
            self._opened.append(dbapi_connection)

    def _hold_back(self, *_: object) -> None:
        """The sender waits until no program runs: SQLite's lock would be the sender's now and then."""
        if _in_background():
            self.gate.wait()

    def cut_off(self) -> None:
        """End the connections that no pool has any more, with the locks that they hold."""
        for dbapi_connection in self._opened:
            with contextlib.suppress(Exception):
                dbapi_connection.close()
        self._opened.clear()


@contextlib.contextmanager
def twins(folder: Path, *, server: Server | None, is_async: bool) -> Iterator[tuple[Twin, Twin]]:
    """Two databases, on this server or on SQLite: one for messages, one without."""
    with contextlib.ExitStack() as closing:
        made: list[Twin] = []
        for name in ("with", "without"):
            if server is None:
                inside = folder / name
                inside.mkdir(parents=True, exist_ok=True)
                database = sqlite_database(inside)
            else:
                database = closing.enter_context(server.fresh_database())
            made.append(Twin(database, server=server, is_async=is_async, has_messages=name == "with"))
            closing.callback(made[-1].close)
        yield made[0], made[1]


def _in_background() -> bool:
    """Whether this is a thread of the outbox."""
    return threading.current_thread().name.startswith("outbox")


def _never_wait(dbapi_connection: Any, _record: object) -> None:
    if _in_background():
        return
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 0")
    cursor.close()
