"""The reconciliation looks for the outbox's tables where the SDK made them. Without Spark."""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import create_engine, make_url

from outbox.migrate import upgrade
from spark_reconcile.core.settings import InboxSource
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from spark_reconcile.sources.sql_statements import inbox_statement, outbox_statements
from tests.fixtures.databases import Database


@pytest.mark.parametrize("of_its_own", [True, False], ids=["a schema of its own", "the business's database"])
def test_tables_are_read_where_the_upgrade_made_them(mysql_like: Database, of_its_own: bool) -> None:
    database = mysql_like if of_its_own else dataclasses.replace(mysql_like, schema=None)
    upgrade(database.url, schema=database.schema, tables=2)

    with reading(DatabaseAddress.of(database.url)) as reader:
        schema = reader.address.schema_of(database.schema)
        statements = [
            *outbox_statements(reader, schema=schema),
            inbox_statement(reader, InboxSource(group="group"), schema=schema),
        ]
        rows = [reader.rows(f"SELECT COUNT(*) FROM {statement.table}") for statement in statements]

    names = ("message", "message_0000", "message_0001", "archive", "inbox")
    assert [statement.table for statement in statements] == [
        f"`{database.namespace.schema}`.`{database.namespace.named(name)}`" for name in names
    ]
    assert rows == [[(0,)]] * 5


def test_a_business_s_database_may_have_a_name_that_is_no_identifier(mysql_like: Database) -> None:
    url = make_url(mysql_like.url).set(database=f"{mysql_like.business}-eu")
    engine = create_engine(mysql_like.url)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE `{url.database}`")
    try:
        upgrade(url)
        with reading(DatabaseAddress.of(url.render_as_string(hide_password=False))) as reader:
            found = outbox_statements(reader, schema=reader.address.schema_of(None))
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE `{url.database}`")
        engine.dispose()

    assert [statement.table for statement in found] == [
        f"`{url.database}`.`outbox_message`", f"`{url.database}`.`outbox_archive`",
    ]  # fmt: skip
