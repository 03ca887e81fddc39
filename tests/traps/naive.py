"""An outbox as it is written at the first try: a table with an id, a status and a time. What the traps catch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox.store.database import error_code
from tests.outbox.shop import Shop

WAIT_SECONDS = 300
DICTIONARY_READS_MAX = 50
"""What a server may read besides: some 20 entries where a table's definition is not in its cache any more."""
NOW_US = 1_000_000


def make_naive_outbox(shop: Shop, rows: int = 0) -> None:
    """`rows` of them are pending and due at once; the index is one that comes to mind first."""
    shop.execute(
        "CREATE TABLE naive (id BIGINT AUTO_INCREMENT PRIMARY KEY, message_id VARCHAR(64) NOT NULL, "
        "status TINYINT NOT NULL, due_at BIGINT NOT NULL, created_at BIGINT NOT NULL, payload VARCHAR(4000), "
        "owner VARCHAR(32), KEY ix_naive_due (status, due_at)) ENGINE=InnoDB"
    )
    if rows:
        values = ", ".join(f"('m{number:05d}', 0, {number}, {rows - number}, 'x')" for number in range(rows))
        shop.execute(f"INSERT INTO naive (message_id, status, due_at, created_at, payload) VALUES {values}")


def run(connection: Connection, statement: str) -> list[tuple[object, ...]]:
    """One statement; its rows, where it has some."""
    result = connection.execute(text(statement))
    return [tuple(row) for row in result] if result.returns_rows else []


@contextlib.contextmanager
def transaction(shop: Shop, level: str = "REPEATABLE READ") -> Iterator[Connection]:
    """A transaction that stays open for the block and is rolled back; it waits a second for a lock."""
    with shop.engine.connect().execution_options(isolation_level=level) as connection:
        run(connection, "SET SESSION innodb_lock_wait_timeout = 1")
        try:
            yield connection
        finally:
            connection.rollback()
            run(connection, "SET SESSION innodb_lock_wait_timeout = DEFAULT")


def insert(connection: Connection, message_id: str = "new", *, due_at: int = NOW_US) -> None:
    """What a producer does."""
    run(
        connection,
        "INSERT INTO naive (message_id, status, due_at, created_at, payload) "
        f"VALUES ('{message_id}', 0, {due_at}, {due_at}, 'x')",
    )


def assert_fails(code: int, act: Callable[[], object]) -> None:
    """The database refuses with this error number."""
    with pytest.raises(DBAPIError) as caught:
        act()
    assert error_code(caught.value) == code


@contextlib.contextmanager
def beside(engine: Engine, statement: str) -> Iterator[threading.Thread]:
    """The statement runs in a transaction of its own, in a thread, and is committed; joined at the end of the block."""

    def act() -> None:
        with contextlib.suppress(DBAPIError), engine.begin() as connection:
            run(connection, statement)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(WAIT_SECONDS)


def wait_for(shop: Shop, question: str) -> None:
    """Ask the server until the answer is not empty. Not for lock waits: these are wait_for_lock_waits()'s."""
    with shop.engine.connect() as connection:
        for _ in range(400):
            if run(connection, question):
                return
            connection.rollback()
            threading.Event().wait(0.15)
    raise TimeoutError(question)


def rows_read(connection: Connection) -> int:
    """How many index entries and rows this connection has read so far."""
    return sum(int(str(value)) for _, value in run(connection, "SHOW SESSION STATUS LIKE 'Handler_read%'"))
