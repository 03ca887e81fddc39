"""What the server sets bounds to: packets, and tables that keep transactions. On real servers."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox.store.row import publish_row
from outbox.store.server_limits import ROW_BYTES_MAX, ServerLimits, row_bytes
from outbox_core import Message
from outbox_core.common.errors import ConfigurationError, InvalidMessage
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop

MIB = 1024 * 1024


def packet_bytes(shop: Shop) -> int:
    """The server's max_allowed_packet."""
    with shop.engine.connect() as connection:
        return int(connection.scalar(text("SELECT @@max_allowed_packet")) or 0)


@pytest.mark.parametrize(
    ("body", "key", "headers", "expected"),
    [
        (b"12345", None, {}, 10),
        (b"", "ab", {}, 4),
        (b"", "\N{GRINNING FACE}", {}, 8),
        (b"", None, {"a": "b"}, 2 * len('{"a":"b"}')),
    ],
)
def test_a_row_counts_each_byte_of_its_data_twice(
    body: bytes, key: str | None, headers: dict[str, str], expected: int
) -> None:
    row = publish_row(Message(id="1", topic="topic", body=body, key=key, headers=headers))

    assert row_bytes(row) == expected + ROW_BYTES_MAX


def test_a_body_above_the_packet_is_refused_before_the_insert_and_the_connection_lives(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    limit = packet_bytes(mysql_shop)
    with mysql_shop.engine.begin() as connection:  # so that a 16 MiB body is too large on every server
        connection.execute(text(f"SET GLOBAL max_allowed_packet = {8 * MIB}"))
    try:
        mysql_shop.engine.dispose()
        box = mysql_shop.box(broker, sender=NO_SENDER, body_bytes_max=16 * MIB)

        with Session(mysql_shop.engine) as session:
            session.begin()  # no connection yet: what the server takes is unknown to publish()
            box.publish("large", b"x" * (4 * MIB), session=session)
            session.add(Payment(id=1))
            with pytest.raises(InvalidMessage, match="max_allowed_packet of 8,388,608") as at_commit:
                session.commit()
            session.rollback()
            connection_id = session.scalar(text("SELECT CONNECTION_ID()"))
            with pytest.raises(InvalidMessage, match="max_allowed_packet of 8,388,608"):
                box.publish("large", b"x" * (4 * MIB), session=session)
            session.add(Payment(id=2))
            box.publish("fits", b"x" * (4 * MIB - 8 * 1024), session=session)
            still = session.scalar(text("SELECT CONNECTION_ID()"))
            session.commit()
    finally:
        with mysql_shop.engine.begin() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {limit}"))
        mysql_shop.engine.dispose()

    assert "publish a reference" in str(at_commit.value)
    assert still == connection_id
    assert mysql_shop.payments() == [2]
    assert mysql_shop.row_topics() == ["fits"]


def test_many_small_messages_are_written_in_statements_below_the_packet(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    limit = packet_bytes(mysql_shop)
    with mysql_shop.engine.begin() as connection:
        connection.execute(text(f"SET GLOBAL max_allowed_packet = {MIB}"))
    try:
        mysql_shop.engine.dispose()
        box = mysql_shop.box(broker, sender=NO_SENDER)

        with Session(mysql_shop.engine) as session, session.begin():
            for _ in range(300):
                box.publish("small", b"'" * 16 * 1024, headers={"name": '"' * 1024}, session=session)
    finally:
        with mysql_shop.engine.begin() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {limit}"))
        mysql_shop.engine.dispose()

    assert len(mysql_shop.rows()) == 300


def test_a_failover_to_a_server_with_a_smaller_packet_is_noticed(mysql_shop: Shop) -> None:
    limit = packet_bytes(mysql_shop)
    bounds = ServerLimits(mysql_shop.engine)
    row = publish_row(Message(id="1", topic="topic", body=b"x" * MIB))
    with mysql_shop.engine.connect() as connection:
        assert bounds.check(connection, [row], table=mysql_shop.store.table) == limit
    try:
        with mysql_shop.engine.begin() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {2 * MIB}"))
        mysql_shop.engine.dispose()  # as a failover does

        with mysql_shop.engine.connect() as connection, pytest.raises(InvalidMessage):
            bounds.check(connection, [row], table=mysql_shop.store.table)
        with pytest.raises(InvalidMessage):
            bounds.refuse_early(row)
    finally:
        with mysql_shop.engine.begin() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {limit}"))
        mysql_shop.engine.dispose()


def test_a_connection_is_asked_once(mysql_shop: Shop) -> None:
    bounds = ServerLimits(mysql_shop.engine)
    row = publish_row(Message(id="1", topic="topic", body=b""))

    with mysql_shop.engine.connect() as connection:
        bounds.check(connection, [row], table=mysql_shop.store.table)
        before = questions(connection)
        for _ in range(5):
            bounds.check(connection, [row], table=mysql_shop.store.table)
        after = questions(connection)

    assert after - before == 1  # the question itself


def questions(connection: Any) -> int:
    """How many statements this connection has sent so far."""
    return int(connection.execute(text("SHOW SESSION STATUS LIKE 'Questions'")).one()[1])


def test_a_message_table_that_keeps_no_transactions_is_refused_until_it_is_mended(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    name = f"{mysql_shop.database.schema}.message"
    mysql_shop.execute(f"ALTER TABLE {name} ENGINE = MyISAM")
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session:
        for number in (1, 2):
            session.begin()
            session.add(Payment(id=number))
            box.publish("topic", "", session=session)
            with pytest.raises(ConfigurationError, match=f"ALTER TABLE {name} ENGINE=InnoDB"):
                session.commit()
            session.rollback()
        mysql_shop.execute(f"ALTER TABLE {name} ENGINE = InnoDB")
        session.begin()
        box.publish("mended", "", session=session)
        session.commit()

    assert mysql_shop.payments() == []
    assert mysql_shop.row_topics() == ["mended"]


@pytest.mark.slow
def test_a_body_of_sixteen_mebibytes_goes_through_where_the_packet_allows_it(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    limit = packet_bytes(mysql_shop)
    with mysql_shop.engine.begin() as connection:
        connection.execute(text(f"SET GLOBAL max_allowed_packet = {64 * MIB}"))
    try:
        mysql_shop.engine.dispose()
        body = bytes(range(256)) * (64 * 1024)
        box = mysql_shop.box(broker, sender=NO_SENDER, body_bytes_max=16 * MIB)
        with Session(mysql_shop.engine) as session, session.begin():
            box.publish("large", body, message_id="large", session=session)
        mysql_shop.end_leases()
        report = mysql_shop.scan(broker).run()
    finally:
        with mysql_shop.engine.begin() as connection:
            connection.execute(text(f"SET GLOBAL max_allowed_packet = {limit}"))
        mysql_shop.engine.dispose()

    assert report.accepted == 1
    assert broker.stored[0].body == body
