"""Business columns of every type: what is read of a key and of a time, in which unit, and what is refused at the start.

Read as Spark's workers read them, without Spark.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import BusinessRule
from spark_reconcile.core.settings import KeyFormat
from spark_reconcile.core.time_buckets import EVER_MS, Span
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, reading
from spark_reconcile.sources.sql_source import Part, SqlReader
from spark_reconcile.sources.sql_statements import business_statement
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import PAID

RULE = BusinessRule(name="r", table="paid", key_column="id", time_column="at", topic=PAID)
DUE_MS = 1_767_323_045_000
BYTES = "0123456789abcdef0123456789abcdef"
DASHED = "01234567-89ab-cdef-0123-456789abcdef"
SIGNED_MAX, UNSIGNED_MAX = 2**63 - 1, 2**64 - 1


# -- due times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "unit", "found"),
    [
        ("DATETIME", "'2026-01-02 03:04:05'", "us", (DUE_MS, 1000)),
        ("DATETIME(1)", "'2026-01-02 03:04:05.5'", "us", (DUE_MS + 500, 100)),
        ("DATETIME(3)", "'2026-01-02 03:04:05.678'", "us", (DUE_MS + 678, 1)),
        ("DATETIME(6)", "'2026-01-02 03:04:05.678900'", "us", (DUE_MS + 678, 1)),
        ("TIMESTAMP", "'2026-01-02 03:04:05'", "us", (DUE_MS, 1000)),
        ("DATE", "'2026-01-02'", "us", (1_767_312_000_000, 86_400_000)),
        ("BIGINT", f"{DUE_MS}678", "us", (DUE_MS, 1)),
        ("BIGINT", f"{DUE_MS}", "ms", (DUE_MS, 1)),
        ("BIGINT", f"{DUE_MS // 1000}", "s", (DUE_MS, 1000)),
    ],
)
def test_a_due_time_is_read_with_the_unit_of_its_column(
    mysql_like: Database, kind: str, value: str, unit: str, found: tuple[int, int]
) -> None:
    _create(mysql_like, f"id INT PRIMARY KEY, at BIGINT, due {kind} NULL", f"(7, 0, {value})")

    (row,) = _rows(mysql_like, replace(RULE, deliver_at_column="due", time_unit=unit))

    assert (row["deliver_at_ms"], row["due_unit_ms"]) == found


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("2026-01-02 03:04:05", (DUE_MS, 1000)),
        ("2026-01-02T03:04:05.678900", (DUE_MS + 679, 1)),
        ("2026-01-02", (1_767_312_000_000, 86_400_000)),
    ],
)
def test_a_due_time_that_sqlite_has_as_text_has_the_unit_in_which_it_is_written(
    sqlite: Database, value: str, found: tuple[int, int]
) -> None:
    _create(sqlite, "id INTEGER PRIMARY KEY, at BIGINT, due DATETIME", f"(7, 0, '{value}')")

    (row,) = _rows(sqlite, replace(RULE, deliver_at_column="due"))

    assert (row["deliver_at_ms"], row["due_unit_ms"]) == found


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "key_format", "key"),
    [
        ("INT(10) ZEROFILL", "42", None, "42"),
        ("BIGINT UNSIGNED ZEROFILL", f"{UNSIGNED_MAX}", None, str(UNSIGNED_MAX)),
        ("DECIMAL(20,0) ZEROFILL", "42", None, "42"),
        ("BIT(16)", "b'100000001'", None, "257"),
        ("VARCHAR(20)", "'0042'", None, "0042"),
        ("BINARY(16)", f"x'{BYTES}'", KeyFormat.HEX, BYTES),
        ("BINARY(16)", f"x'{BYTES}'", KeyFormat.UUID, DASHED),
        ("VARBINARY(16)", f"x'{BYTES}'", KeyFormat.UUID, DASHED),
        ("CHAR(32)", f"'{BYTES}'", KeyFormat.UUID, DASHED),
        ("CHAR(36)", f"'{DASHED.upper()}'", KeyFormat.UUID, DASHED),
        ("BINARY(16)", "NULL", KeyFormat.UUID, None),
    ],
)
def test_a_key_is_the_text_that_the_business_publishes(
    mysql_like: Database, kind: str, value: str, key_format: KeyFormat | None, key: str | None
) -> None:
    _create(mysql_like, f"id {kind} NULL, at BIGINT", f"({value}, 0)")

    (row,) = _rows(mysql_like, replace(RULE, key_format=key_format))

    assert row["message_key"] in {key, key or ""}


@pytest.mark.parametrize(
    ("kind", "value", "key_format", "key"),
    [
        ("INTEGER", "42", None, "42"),
        ("BLOB", f"x'{BYTES}'", KeyFormat.HEX, BYTES),
        ("BINARY(16)", f"x'{BYTES}'", KeyFormat.UUID, DASHED),
        ("CHAR(32)", f"'{BYTES}'", KeyFormat.UUID, DASHED),
    ],
)
def test_a_key_in_sqlite_is_the_text_that_the_business_publishes(
    sqlite: Database, kind: str, value: str, key_format: KeyFormat | None, key: str
) -> None:
    _create(sqlite, f"id {kind}, at BIGINT", f"({value}, 0)")

    (row,) = _rows(sqlite, replace(RULE, key_format=key_format))

    assert row["message_key"] == key


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("BINARY(16)", r"key column id of paid is of type .*binary\(16\), .* key_format \(hex or uuid\)"),
        ("BLOB", "key column id of paid is of type blob, .* key_format"),
        ("DOUBLE", "key column id of paid is of type double, whose text depends on who writes it"),
        ("FLOAT", "key column id of paid is of type float, whose text"),
    ],
)
def test_a_key_that_cannot_be_compared_is_refused_at_the_start(database: Database, kind: str, told: str) -> None:
    _create(database, f"id {kind}, at BIGINT")

    with pytest.raises(ConfigurationError, match=told):
        _rows(database, RULE)


def test_a_text_of_sqlite_that_is_no_utf_8_is_refused_without_its_value(sqlite: Database) -> None:
    _create(sqlite, "id TEXT, at BIGINT", "(CAST(x'ff73656372657480' AS TEXT), 0)")

    with pytest.raises(
        ConfigurationError, match=r'table "paid".* CAST\("id" AS TEXT\) .*not UTF-8.*key_format'
    ) as raised:
        _rows(sqlite, RULE)

    assert "secret" not in str(raised.value)


# -- sentinels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["us", "ms", "s"])
@pytest.mark.parametrize("sentinel", [SIGNED_MAX, UNSIGNED_MAX])
def test_a_row_with_the_largest_number_is_read_and_has_no_time(mysql_like: Database, unit: str, sentinel: int) -> None:
    _create(
        mysql_like, "id BIGINT UNSIGNED, at BIGINT UNSIGNED, due BIGINT UNSIGNED",
        f"({sentinel}, {sentinel}, {sentinel}), (7, {DUE_MS}, {DUE_MS})",
    )  # fmt: skip

    rows = _rows(mysql_like, replace(RULE, deliver_at_column="due", time_unit=unit))

    (row,) = [row for row in rows if row["message_key"] == str(sentinel)]
    assert (row["created_ms"], row["at_ms"], row["deliver_at_ms"]) == (None, EVER_MS, EVER_MS)
    assert len(rows) == 2


@pytest.mark.parametrize("unit", ["us", "ms", "s"])
@pytest.mark.parametrize("sentinel", [SIGNED_MAX, -SIGNED_MAX - 1])
def test_a_row_of_sqlite_with_the_largest_number_is_read_and_has_no_time(
    sqlite: Database, unit: str, sentinel: int
) -> None:
    _create(sqlite, "id BIGINT, at BIGINT, due BIGINT", f"({sentinel}, {sentinel}, {sentinel})")

    (row,) = _rows(sqlite, replace(RULE, deliver_at_column="due", time_unit=unit))

    ever_ms = EVER_MS if sentinel > 0 else -EVER_MS
    assert (row["created_ms"], row["at_ms"], row["deliver_at_ms"]) == (None, ever_ms, ever_ms)


# -- by the hour -------------------------------------------------------------------------------------------------------

HOUR: Span = Span(since_ms=DUE_MS - 3_600_000, until_ms=DUE_MS + 3_600_000)
LATEST_MS = DUE_MS + 90 * 86_400_000
OF_NO_HOUR = {
    "'2025-00-10 00:00:00'": "month 00", "'2025-11-00 00:00:00'": "day 00", "'2026-02-31 00:00:00'": "31 February",
    "'0000-00-00 00:00:00'": "no date", "'2038-01-19 03:14:07'": "a sentinel", "'1970-01-01 00:00:01'": "the epoch",
    "NULL": "null",
}  # fmt: skip


@pytest.mark.parametrize("index", ["", ", KEY (at)"])
@pytest.mark.parametrize("kind", ["DATETIME", "DATETIME(3)"])
def test_a_row_whose_date_is_of_no_hour_is_read_for_every_hour_with_an_index_or_without(
    mysql_like: Database, kind: str, index: str
) -> None:
    values = [f"({number}, {value})" for number, value in enumerate(OF_NO_HOUR)]
    others = ["(100, '2026-01-02 03:04:05')", "(101, '2026-01-01 00:00:00')", "(102, '2025-12-31 23:59:59')"]
    _create(mysql_like, f"id INT, at {kind} NULL{index}", ", ".join(values + others))

    rows = _rows(mysql_like, RULE, span=HOUR, latest_ms=LATEST_MS)

    found = {row["message_key"]: row["created_ms"] for row in rows}
    assert found == {**{str(number): None for number in range(len(OF_NO_HOUR))}, "100": DUE_MS}


@pytest.mark.parametrize("unit", ["us", "ms", "s"])
def test_a_row_whose_number_is_of_no_hour_is_read_for_every_hour(database: Database, unit: str) -> None:
    per_second = {"us": 1_000_000, "ms": 1000, "s": 1}[unit]
    seconds = [DUE_MS // 1000, DUE_MS // 1000 - 7200, 4_000_000_000, 2_147_483_647, 5, -5]
    values = ", ".join(f"({number}, {second * per_second})" for number, second in enumerate(seconds))
    _create(database, "id INT, at BIGINT", values)

    rows = _rows(database, replace(RULE, time_unit=unit), span=HOUR, latest_ms=LATEST_MS)

    found = {row["message_key"]: row["created_ms"] for row in rows}
    assert found == {"0": DUE_MS, "2": None, "3": None, "4": None, "5": None}


def test_31_february_is_no_day_in_sqlite_either(sqlite: Database) -> None:
    values = "(1, '2026-02-31 03:04:05'), (2, '2026-00-10'), (3, '2026-01-02T05:04:05+02:00'), (4, '2026-01-20')"
    _create(sqlite, "id INT, at DATETIME", values)

    rows = _rows(sqlite, RULE, span=HOUR, latest_ms=LATEST_MS)

    assert {row["message_key"]: row["created_ms"] for row in rows} == {"1": None, "2": None, "3": DUE_MS}


def test_a_row_with_a_day_is_as_new_as_the_end_of_that_day(database: Database) -> None:
    _create(database, "id INT, at DATE", "(1, '2026-01-02')")

    (row,) = _rows(database, RULE)

    assert (row["created_ms"], row["at_ms"]) == (1_767_312_000_000, 1_767_312_000_000 + 86_399_999)


def _create(database: Database, columns: str, values: str = "") -> None:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        if database.name != "sqlite":
            connection.execute(text("SET time_zone = '+00:00', sql_mode = 'ALLOW_INVALID_DATES'"))
        connection.execute(text(f"CREATE TABLE paid ({columns})"))
        if values:
            connection.exec_driver_sql(f"INSERT INTO paid VALUES {values}")
    engine.dispose()


def _rows(
    database: Database, rule: BusinessRule, *, span: Span | None = None, latest_ms: int = 4_102_444_800_000
) -> list[dict[str, Any]]:
    address = DatabaseAddress.of(database.url)
    with reading(address) as reader:
        statement = business_statement(reader, rule, 0, span=span, latest_ms=latest_ms)
    return [
        row for batch in SqlReader(address, [statement], snapshot=True).read(Part((0,))) for row in batch.to_pylist()
    ]
