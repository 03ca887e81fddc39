"""Deadlocks and lock waits on purpose, by a rival transaction on the shop's payments. Not a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox.store.database import error_code
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS = 300


def add_rows_to_fight_over(shop: Shop) -> None:
    """Payments 1 and 2, and those from 100 on that give the rival its weight."""
    values = ", ".join(f"({number}, '')" for number in [1, 2, *range(100, 120)])
    shop.execute(f"INSERT INTO payment (id, note) VALUES {values}")


@contextlib.contextmanager
def rival(engine: Engine, *, first: int, then: int) -> Iterator[threading.Event]:
    """Another transaction: it holds the row `first` and, once the event that it yields is set, asks for `then`."""
    holds, asks = threading.Event(), threading.Event()

    def run() -> None:
        with engine.connect() as connection, connection.begin():
            # The deadlock's victim is who changed fewer rows: the rival changes many.
            connection.execute(update(Payment).where(Payment.id >= 100).values(note="rival"))
            lock(connection, first)
            holds.set()
            asks.wait(WAIT_SECONDS)
            lock(connection, then)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert holds.wait(WAIT_SECONDS)
        yield asks
    finally:
        asks.set()
        thread.join(WAIT_SECONDS)


@contextlib.contextmanager
def short_lock_waits() -> Iterator[None]:
    """In the block every transaction, background work's too, waits for a lock for a second at most."""

    def shorten(connection: Connection) -> None:
        connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")

    event.listen(Engine, "begin", shorten)
    try:
        yield
    finally:
        event.remove(Engine, "begin", shorten)


def lock(connection: Connection, number: int) -> None:
    """Take the row's lock."""
    connection.execute(select(Payment.id).where(Payment.id == number).with_for_update())


def become_a_deadlocks_victim(session: Session, engine: Engine) -> None:
    """Deadlock with a rival, lose, and swallow the error, as careless code does."""
    lock(session.connection(), 1)
    with rival(engine, first=2, then=1) as asks:
        asks.set()
        with pytest.raises(OperationalError) as caught:
            lock(session.connection(), 2)
    assert error_code(caught.value) == 1213
