"""Servers that take no writes: a replica, a primary in a switch-over, a READ ONLY transaction. V6 of docs/traps.md."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from outbox.store.row import publish_row
from outbox_core import Message
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.traps.naive import assert_fails, run
from tests.traps.passes import compensate, one_pass
from tests.traps.switchable_shop import USER, switchable_shop

OPTION_FORBIDS = 1290


@pytest.fixture
def switched(mysql_like_of_module: LocalServer) -> Iterator[tuple[LocalServer, Shop, Engine]]:
    """A server that may be switched, and an engine of a user whom read_only applies to."""
    with switchable_shop(mysql_like_of_module) as shop:
        yield mysql_like_of_module, shop, engine_of(shop, USER)


def engine_of(shop: Shop, user: str) -> Engine:
    """An engine of another user; disposed of with the shop."""
    engine = create_engine(make_url(shop.database.url).set(username=user))
    shop.closing.callback(engine.dispose)
    return engine


@contextlib.contextmanager
def read_only(server: LocalServer) -> Iterator[None]:
    """As a replica is, and as a primary is while another one takes over."""
    server.execute("SET GLOBAL read_only = 1")
    try:
        yield
    finally:
        server.execute("SET GLOBAL read_only = 0")


def test_a_commit_on_a_read_only_server_says_so_and_the_next_one_after_the_switch_is_whole(
    switched: tuple[LocalServer, Shop, Engine], broker: RecordingBroker
) -> None:
    server, shop, engine = switched
    box = shop.box(broker, engine=engine, sender=NO_SENDER)

    with Session(engine) as session:
        with read_only(server):
            session.begin()
            box.publish("refused", "", session=session)
            with pytest.raises(DatabaseUnavailable, match=r"read-only.*give the URL of the primary") as caught:
                session.commit()
            session.rollback()
        session.add(Payment(id=1))
        box.publish("taken", "", session=session)
        session.commit()

    assert caught.value.retryable
    assert shop.row_topics() == ["taken"]


def test_a_compensator_on_a_read_only_server_says_so_and_goes_on_after_the_switch(
    switched: tuple[LocalServer, Shop, Engine], broker: RecordingBroker, caplog: pytest.LogCaptureFixture
) -> None:
    server, shop, engine = switched
    rows = [publish_row(Message(id="a", topic="topic", body=b""))]
    with shop.engine.begin() as connection:
        shop.store.insert(connection, rows, token="d" * 32, lease_us=-1)

    with (
        read_only(server),
        caplog.at_level(logging.WARNING),
        pytest.raises(DatabaseUnavailable, match=r"read-only.*give the URL of the primary"),
    ):
        one_pass(shop, broker, engine=engine)
    assert broker.batches == [], "a replica's rows may have been sent long ago"
    one_pass(shop, broker, engine=engine)

    assert broker.ids == ["a"]
    assert shop.rows() == []


def test_a_settle_that_meets_the_switch_keeps_the_row_for_the_new_primary(
    switched: tuple[LocalServer, Shop, Engine], broker: RecordingBroker
) -> None:
    server, shop, engine = switched
    rows = [publish_row(Message(id="a", topic="topic", body=b""))]
    with shop.engine.begin() as connection:
        shop.store.insert(connection, rows, token="d" * 32, lease_us=-1)
    broker.rule = lambda _batch: server.execute("SET GLOBAL read_only = 1") and None

    with pytest.raises(DatabaseUnavailable, match="read-only"):
        one_pass(shop, broker, engine=engine)
    broker.rule = None
    server.execute("SET GLOBAL read_only = 0")
    compensate(shop, broker)

    assert (broker.ids, broker.duplicates) == (["a"], ["a"])
    assert shop.archived() == 1


def test_naive_a_replica_answers_what_it_is_asked_and_refuses_only_the_write(
    switched: tuple[LocalServer, Shop, Engine],
) -> None:
    server, _, engine = switched

    with read_only(server), engine.connect() as connection:
        assert run(connection, "SELECT COUNT(*) FROM payment") == [(0,)]  # so a scan sees nothing wrong
        assert_fails(OPTION_FORBIDS, lambda: run(connection, "INSERT INTO payment VALUES (1, '')"))


def test_publishing_in_a_read_only_transaction_is_refused_with_the_cure(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        session.execute(text("SET SESSION TRANSACTION READ ONLY"))
        session.rollback()
        session.begin()
        box.publish("topic", "", session=session)
        with pytest.raises(ConfigurationError, match=r"READ ONLY.*begin one that writes"):
            session.commit()
        session.rollback()
        session.execute(text("SET SESSION TRANSACTION READ WRITE"))

    assert mysql_shop.rows() == []


def test_a_user_without_a_grant_on_the_message_table_is_told_so(mysql_shop: Shop, broker: RecordingBroker) -> None:
    user = f"poor_{mysql_shop.database.schema}"
    business = mysql_shop.engine.url.database
    mysql_shop.execute(f"CREATE USER {user}@'%'")
    mysql_shop.execute(f"GRANT ALL ON {business}.* TO {user}@'%'")
    try:
        engine = engine_of(mysql_shop, user)
        box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

        with Session(engine) as session:
            session.begin()
            box.publish("topic", "", session=session)
            with pytest.raises(ConfigurationError, match="grants on the outbox's schema: SELECT, INSERT"):
                session.commit()
            session.rollback()
    finally:
        mysql_shop.execute(f"DROP USER {user}@'%'")
