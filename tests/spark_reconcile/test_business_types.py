"""Business rows with keys and times of every type, on a server: none innocent is accused, and each fault is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import UUID

import pytest
from sqlalchemy import create_engine, text

from spark_reconcile import BusinessRule, Settings, Summary, run, run_windows
from spark_reconcile.core.settings import KeyFormat
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, SECOND_MS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

DUE, DAY, REF, MOMENT, WRONG = "typed.due", "typed.day", "typed.ref", "typed.moment", "typed.wrong"
SINCE_MS: Final = NOW_MS - 34 * HOUR_MS
AGE_MS: Final = 90 * MINUTE_MS
DUE_MS: Final = NOW_MS + 5 * HOUR_MS
SENTINEL: Final = 2**64 - 1
TABLES: Final = (
    "CREATE TABLE due (id INT(10) UNSIGNED ZEROFILL, at DATETIME, due DATETIME)",
    "CREATE TABLE by_day (id INT, at DATE)",
    "CREATE TABLE ref (id BINARY(16), at_ms BIGINT UNSIGNED)",
    "CREATE TABLE moment (id BIGINT UNSIGNED, at DATETIME(6), KEY (at))",
    "CREATE TABLE wrong (id INT, order_no INT, at_ms BIGINT)",
)
RULES: Final = (
    BusinessRule(name="due", table="due", key_column="id", time_column="at", deliver_at_column="due", topic=DUE),
    BusinessRule(name="day", table="by_day", key_column="id", time_column="at", topic=DAY),
    BusinessRule(
        name="ref", table="ref", key_column="id", key_format=KeyFormat.UUID, time_column="at_ms", time_unit="ms",
        topic=REF,
    ),
    BusinessRule(name="moment", table="moment", key_column="id", time_column="at", topic=MOMENT),
    BusinessRule(name="wrong", table="wrong", key_column="id", time_column="at_ms", time_unit="ms", topic=WRONG),
)  # fmt: skip
EXPECTED: Final = {
    ("message", DUE, "stored", 4), ("business", DUE, "announced", 3), ("business", DUE, "due_time_differs", 1),
    ("business", DUE, "no_message", 1),
    ("message", DAY, "stored", 2), ("business", DAY, "announced", 2), ("business", DAY, "no_message", 1),
    ("business", DAY, "message_in_grace", 1),
    ("message", REF, "stored", 2), ("business", REF, "announced", 2), ("business", REF, "no_message", 1),
    ("message", MOMENT, "stored", 4), ("business", MOMENT, "announced", 4),
    ("message", WRONG, "no_business_row", 5), ("business", WRONG, "no_message", 5),
}  # fmt: skip


def test_keys_and_times_of_every_type_are_compared_and_a_sentinel_is_one_rows_verdict(
    mysql_like: Database, tmp_path: Path, spark: SparkSession
) -> None:
    settings = _written(mysql_like, tmp_path)

    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(
        replace(settings, output=tmp_path / "hours"), since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait
    )

    sentinel = {("business", MOMENT, "impossible_time", 1)}
    assert _verdicts(whole) == EXPECTED | sentinel
    assert _verdicts(by_the_hour) == EXPECTED, "a row without a time and a message is in no hour: it is in the note"
    for summary in (whole, by_the_hour):
        (cause,) = summary.causes
        assert (cause.source, cause.what, cause.count) == ("business", "wrong", 10), "another column is meant"
        assert "has the key of any of 5 messages on its topic typed.wrong" in cause.sentence
    (note,) = [one.note for one in by_the_hour.inputs if one.what == "moment"]
    assert "rows have a time that cannot be true" in note


def _written(database: Database, tmp_path: Path) -> Settings:
    world = World()
    world.groups()
    rows: dict[str, list[str]] = {"due": [], "by_day": [], "ref": [], "moment": [], "wrong": []}
    at, utc = _text(NOW_MS - AGE_MS), _text(DUE_MS)
    for number, (due_ms, apart_ms) in enumerate([(DUE_MS, 0), (DUE_MS, 999), (DUE_MS, -500), (DUE_MS, 5 * SECOND_MS)]):
        _send(world, DUE, str(number), deliver_at_ms=due_ms + apart_ms)
        rows["due"].append(f"({number}, '{at}', '{utc}')")
    rows["due"].append(f"(7, '{at}', '{utc}')")  # lost
    for number, age_ms in enumerate((AGE_MS, 20 * HOUR_MS)):
        _send(world, DAY, str(number), age_ms=age_ms)
        rows["by_day"].append(f"({number}, '{_text(NOW_MS - age_ms)[:10]}')")
    rows["by_day"].append(f"(7, '{_text(NOW_MS - 20 * HOUR_MS)[:10]}')")  # lost
    rows["by_day"].append(f"(8, '{at[:10]}')")  # on its way until this day is over
    for number in range(3):
        reference = UUID(int=number)
        if number < 2:
            _send(world, REF, str(reference))
        rows["ref"].append(f"(x'{reference.hex}', {NOW_MS - AGE_MS})")
    dates = ("2038-01-19 03:14:07", "2026-00-10 00:00:00", "2026-02-31 00:00:00", at)
    for number, date in enumerate(dates):
        _send(world, MOMENT, str(number))
        rows["moment"].append(f"({number}, '{date}')")
    rows["moment"].append(f"({SENTINEL}, '9999-12-31 23:59:59')")
    for number in range(5):
        _send(world, WRONG, str(number))
        rows["wrong"].append(f"({number + 100}, {number}, {NOW_MS - AGE_MS})")
    settings = world.write(database, tmp_path)
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(text("SET sql_mode = 'ALLOW_INVALID_DATES'"))
        for statement in TABLES:
            connection.execute(text(statement))
        for table, values in rows.items():
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES {', '.join(values)}")
    engine.dispose()
    return replace(settings, rules=RULES, complete_since_ms=1)


def _send(world: World, topic: str, key: str, *, age_ms: int = AGE_MS, deliver_at_ms: int | None = None) -> None:
    message = world.sent(f"{topic}-{key}", key=key, topic=topic, age_ms=age_ms, deliver_at_ms=deliver_at_ms)
    world.store(
        message, key=key, topic=topic, age_ms=age_ms, deliver_at_ms=deliver_at_ms, scheduled=deliver_at_ms is not None
    )  # fmt: skip


def _text(time_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _verdicts(summary: Summary) -> set[tuple[str, str, str, int]]:
    counts: dict[tuple[str, str, str], int] = {}
    for one in summary.verdict_counts:
        place = (str(one.scope), one.topic, one.rule)
        counts[place] = counts.get(place, 0) + one.count
    return {(*place, count) for place, count in counts.items()}
