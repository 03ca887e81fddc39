"""Keys that a database takes for equal and Spark does not are named as what they are, not as lost and phantom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.repair.findings import unpublished_rows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, PAID, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPELT = [("A1", "a1"), ("b2", "b2 "), ("c3 ", "C3"), ("same", "same"), ("lost", None), (None, "phantom")]
ACCENTED = [
    ("Muller", "M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller"),
    ("strasse", "stra\N{LATIN SMALL LETTER SHARP S}e"),
    ("cafe\N{COMBINING ACUTE ACCENT}", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"),
    ("same", "same"), ("lost", None), (None, "phantom"),
]  # fmt: skip
RESPELLED = {
    ("message", "key_spelling_differs", "mismatch", "finding"): 3,
    ("business", "message_key_spelling_differs", "mismatch", "finding"): 3,
    ("business", "no_message", "lost", "finding"): 1,
    ("message", "no_business_row", "phantom", "finding"): 1,
}


@pytest.mark.spark
def test_keys_that_differ_only_in_case_or_trailing_blanks_are_one_finding_and_nothing_is_called_lost(
    mysql_like: Database, tmp_path: Path, spark: SparkSession
) -> None:
    settings = _with_text_keys(mysql_like, tmp_path)

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    assert _findings(summary) == RESPELLED
    assert summary.sentence == "Not balanced: 1 lost, 1 phantom, 3 mismatch."
    assert {one.key for one in summary.examples if one.rule == "key_spelling_differs"} == {"a1", "b2 ", "C3"}
    folder = Path(summary.folder)
    assert [one.key for one in unpublished_rows([folder], rows_max=10)] == ["lost"], "none is to be published again"
    confirmed = pq.read_table(folder / "verdicts", filters=[("rule", "=", "key_spelling_differs")]).to_pylist()
    assert [row["confirmed"] for row in confirmed] == [True] * 3
    assert None not in _collations(summary)


@pytest.mark.spark
def test_by_the_hour_such_keys_are_the_same_findings(sqlite: Database, tmp_path: Path, spark: SparkSession) -> None:
    settings = _with_text_keys(sqlite, tmp_path)

    summary = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)

    assert _findings(summary) == RESPELLED
    folders = (tmp_path / "out" / "windows").glob("*/*/*verdicts")
    assert set().union(*map(_collations_in, folders)) == {"UTF8_LCASE_RTRIM"}, "SQLite is not asked"


@pytest.mark.spark
def test_keys_that_the_collation_of_the_column_calls_equal_are_the_same_finding_whole_and_by_the_hour(
    mysql_like: Database, tmp_path: Path, spark: SparkSession
) -> None:
    exact = _with_text_keys(mysql_like, tmp_path / "exact", pairs=ACCENTED, collation="utf8mb4_bin")

    strict = run(exact, session=spark, now_ms=NOW_MS, pause=no_wait)
    settings = _with_text_keys(mysql_like, tmp_path, pairs=ACCENTED, collation="utf8mb4_unicode_ci")
    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)

    assert _findings(whole) == _findings(by_the_hour) == RESPELLED
    assert _collations(whole) == {"utf8mb4_unicode_ci"}, "both the message and the row name it"
    assert _findings(strict) == {
        ("business", "no_message", "lost", "finding"): 4, ("message", "no_business_row", "phantom", "finding"): 4,
    }  # fmt: skip


def _collations(summary: Summary) -> set[str | None]:
    return set().union(*(_collations_in(Path(summary.folder) / name) for name in ("verdicts", "business_verdicts")))


def _collations_in(table: Path) -> set[str | None]:
    """By which collation the keys of these findings are equal; no other row names one."""
    rows = pq.read_table(table).to_pylist()
    assert all(row["collation"] is None for row in rows if "key_spelling_differs" not in row["rule"])
    return {row["collation"] for row in rows if "key_spelling_differs" in row["rule"]}


def _findings(summary: Summary) -> dict[tuple[str, str, str, str], int]:
    return {
        (str(one.scope), one.rule, str(one.state), str(one.severity)): one.count
        for one in summary.verdict_counts
        if one.severity == "finding"
    }


def _with_text_keys(
    database: Database, folder: Path, *, pairs: Sequence[tuple[str | None, str | None]] = SPELT, collation: str = ""
) -> Settings:
    """Orders whose keys are texts, as rows have them and as their messages were published."""
    world = World()
    world.groups()
    for number, (_, message) in enumerate(pairs):
        if message is not None:
            sequence = world.store(world.sent(f"m-{number}", key=message), key=message)
            for group in (TICKETS, MAIL):
                world.done(f"m-{number}", sequence, group, age_ms=HOUR_MS)
    settings = world.write(database, folder)
    engine = create_engine(database.url)
    try:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS bookings"))
            connection.execute(
                text(f"CREATE TABLE bookings (code VARCHAR(32) {_collate(collation)} NOT NULL, at_us BIGINT NOT NULL)")
            )
            for row, _ in pairs:
                if row is not None:
                    values = {"code": row, "at_us": (NOW_MS - HOUR_MS) * 1000}
                    connection.execute(text("INSERT INTO bookings (code, at_us) VALUES (:code, :at_us)"), values)
    finally:
        engine.dispose()
    rule = replace(settings.rules[0], table="bookings", key_column="code", time_column="at_us", where=[], topic=PAID)
    return replace(settings, rules=[rule])


def _collate(collation: str) -> str:
    return f"CHARACTER SET utf8mb4 COLLATE {collation}" if collation else ""
