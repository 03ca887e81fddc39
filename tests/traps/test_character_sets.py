"""Keys and headers of any language, connections of any character set: the right bytes. X4, X5 of docs/traps.md."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox.store.database import background_engine
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.traps.naive import assert_fails, make_naive_outbox, run
from tests.traps.passes import compensate

KEY = "Заказ 注文 \N{GRINNING FACE} é \\ ' \" % :x"
HEADERS = {"who": "Žofie \N{GRINNING FACE}", "quotes": "\"'\\"}
BODY = "тело \N{GRINNING FACE}".encode() + bytes(range(256))
CHARSETS = ["utf8mb4", "utf8mb3", "latin1", "ascii", "cp1251", "gbk", "sjis", "cp932", "big5"]
STRICT = "STRICT_TRANS_TABLES"
CONNECTIONS = [(charset, STRICT) for charset in CHARSETS] + [
    (charset, sql_mode) for charset in ("utf8mb3", "latin1", "gbk") for sql_mode in ("", "NO_BACKSLASH_ESCAPES", "ANSI")
]


@pytest.mark.parametrize(("charset", "sql_mode"), CONNECTIONS)
def test_a_message_comes_out_as_it_went_in_whatever_the_connection_speaks(
    mysql_shop: Shop, broker: RecordingBroker, charset: str, sql_mode: str
) -> None:
    engine = mysql_shop.other_engine(connect_args={"charset": charset, "sql_mode": sql_mode})
    box = mysql_shop.box(broker, engine=engine, sender=NO_SENDER)

    with Session(engine) as session, session.begin():
        session.add(Payment(id=1))
        box.publish("topic", BODY, key=KEY, headers=HEADERS, session=session)
    compensate(mysql_shop, broker)

    [message] = broker.stored
    assert (message.key, dict(message.headers), message.body) == (KEY, HEADERS, BODY)


def test_a_session_that_changes_its_character_set_by_sql_writes_the_right_bytes(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)

    with Session(mysql_shop.engine) as session, session.begin():
        session.execute(text("SET NAMES latin1"))
        box.publish("topic", BODY, key=KEY, headers=HEADERS, session=session)
    mysql_shop.engine.dispose()

    [row] = mysql_shop.rows()
    assert (row["message_key"], row["body"]) == (KEY, BODY)


def test_background_connections_read_the_right_characters_whatever_the_url_says(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker, sender=NO_SENDER)
    with Session(mysql_shop.engine) as session, session.begin():
        box.publish("topic", "", key=KEY, session=session)
    legacy = mysql_shop.other_engine(connect_args={"charset": "latin1"})
    background = background_engine(legacy)
    column = select(mysql_shop.tables.message.c.message_key)

    with background.connect() as ours, legacy.connect() as naive:
        read, misread = ours.scalar(column), naive.scalar(column)
    background.dispose()

    assert read == KEY
    assert misread is not None
    assert "?" in misread


def test_naive_four_byte_characters_fail_or_become_question_marks(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)
    insert = "INSERT INTO naive (message_id, status, due_at, created_at, payload) VALUES ('1', 0, 1, 1, :payload)"
    engine = mysql_shop.other_engine(connect_args={"charset": "utf8mb3"})

    def write(sql_mode: str) -> None:
        with engine.begin() as connection:
            run(connection, f"SET SESSION sql_mode = '{sql_mode}'")
            connection.execute(text(insert), {"payload": "a\N{GRINNING FACE}b"})

    assert_fails(1366, lambda: write(STRICT))
    write("")

    with mysql_shop.engine.connect() as connection:
        assert run(connection, "SELECT payload FROM naive") == [("a????b",)]


def test_naive_a_column_that_is_too_small_fails_the_business_transaction_or_cuts_the_message(mysql_shop: Shop) -> None:
    make_naive_outbox(mysql_shop)
    statement = text(
        "INSERT INTO naive (message_id, status, due_at, created_at, payload) VALUES ('1', 0, 1, 1, REPEAT('x', 4001))"
    )
    strict = mysql_shop.other_engine()
    lax = mysql_shop.other_engine()
    event.listen(lax, "connect", lambda raw, _: raw.query("SET SESSION sql_mode = ''"))

    with strict.connect() as connection, pytest.raises(DBAPIError, match="1406"):
        connection.execute(statement)
    with lax.begin() as connection:
        connection.execute(statement)

    with mysql_shop.engine.connect() as connection:
        lengths: list[Any] = run(connection, "SELECT LENGTH(payload) FROM naive")
    assert lengths == [(4000,)]
