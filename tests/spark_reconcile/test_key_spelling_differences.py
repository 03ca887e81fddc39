"""Keys that a database takes for equal and Spark does not are named as what they are, not as lost and phantom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.repair.plan import unpublished_rows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MAIL, NOW_MS, PAID, TICKETS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Pair = tuple[str | None, str | None]
"""The key of a row, and that under which its message was published; None: there is no such row or message."""
FOLDED: Sequence[Pair] = [("A1", "a1"), ("b2", "b2 "), ("c3 ", "C3")]
ACCENTED: Sequence[Pair] = [
    ("Muller", "M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller"),
    ("strasse", "stra\N{LATIN SMALL LETTER SHARP S}e"),
    ("cafe\N{COMBINING ACUTE ACCENT}", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"),
    ("final", "\N{LATIN SMALL LIGATURE FI}nal"),
]
OTHERS: Sequence[Pair] = [("same", "same"), (None, "SAME"), ("lost", None), (None, "phantom")]
"""Of `SAME` the row has a message already, whose key is exactly its own."""
STRICT = "order.strict"
PADDED = 1
"""Of these pairs the collation of bytes calls one equal, too: it ignores blanks at the end, in MySQL and MariaDB."""
Findings = dict[tuple[str, str, str, str], int]


def _respelled(pairs: int, *, lost: int = 1, phantom: int = 2) -> Findings:
    return {
        ("message", "key_spelling_differs", "mismatch", "finding"): pairs,
        ("business", "message_key_spelling_differs", "mismatch", "finding"): pairs,
        ("business", "no_message", "lost", "finding"): lost,
        ("message", "no_business_row", "phantom", "finding"): phantom,
    }


@pytest.mark.spark
def test_keys_that_the_collation_of_the_column_calls_equal_are_one_finding_and_nothing_is_called_lost(
    mysql_like: Database, tmp_path: Path, spark: SparkSession
) -> None:
    pairs = [*FOLDED, *ACCENTED, *OTHERS]
    count = len(FOLDED) + len(ACCENTED)
    settings = _with_text_keys(
        mysql_like, tmp_path, {PAID: (pairs, "utf8mb4_unicode_ci"), STRICT: (pairs, "utf8mb4_bin")}
    )

    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)

    strict = _respelled(PADDED, lost=1 + count - PADDED, phantom=2 + count - PADDED)
    for summary in (whole, by_the_hour):
        assert _findings(summary, PAID) == _respelled(count)
        assert _findings(summary, STRICT) == strict, "where the database calls keys different, each is one of its own"
        assert summary.sentence == "Not balanced: 8 lost, 10 phantom, 8 mismatch."
    folder = Path(whole.folder)
    rows = _rows(folder / "verdicts") + _rows(folder / "business_verdicts")
    told = [row for row in rows if "key_spelling_differs" in row["rule"]]
    assert {(row["topic"], row["collation"]) for row in told} == {
        (PAID, "utf8mb4_unicode_ci"), (STRICT, "utf8mb4_bin"),
    }  # fmt: skip
    assert {row["message_key"] for row in told if row["topic"] == PAID} == {
        key for pair in (*FOLDED, *ACCENTED) for key in pair
    }  # fmt: skip
    assert all(row["confirmed"] for row in told if "message_id" in row)
    assert {row["collation"] for row in rows if row not in told} == {None}
    unpublished = {(one.topic, one.key) for one in unpublished_rows([folder], rows_max=100)}
    assert {key for topic, key in unpublished if topic == PAID} == {"lost"}, "none is to be published again"
    assert len(unpublished) == 1 + 1 + count - PADDED


@pytest.mark.spark
def test_by_the_hour_keys_in_sqlite_that_differ_only_in_case_or_trailing_blanks_are_the_same_finding(
    sqlite: Database, tmp_path: Path, spark: SparkSession
) -> None:
    settings = _with_text_keys(sqlite, tmp_path, {PAID: ([*FOLDED, *OTHERS], "")})

    summary = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)

    assert _findings(summary, PAID) == _respelled(len(FOLDED))
    rows = [row for folder in (tmp_path / "out" / "windows").glob("*/*/*verdicts") for row in _rows(folder)]
    told = {row["collation"] for row in rows if "key_spelling_differs" in row["rule"]}
    assert told == {"UTF8_LCASE_RTRIM"}, "SQLite is not asked"


def _rows(table: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(table).to_pylist()
    return rows


def _findings(summary: Summary, topic: str) -> Findings:
    return {
        (str(one.scope), one.rule, str(one.state), str(one.severity)): one.count
        for one in summary.verdict_counts
        if one.severity == "finding" and one.topic == topic
    }


def _with_text_keys(database: Database, folder: Path, keys: dict[str, tuple[Sequence[Pair], str]]) -> Settings:
    """Orders whose keys are texts, as rows have them and as their messages were published, and the collation of their
    column, by topic.
    """
    world = World()
    world.groups()
    for topic, (pairs, _) in keys.items():
        for number, (_, key) in enumerate(pairs):
            if key is not None:
                name = f"{topic}-{number}"
                sequence = world.store(world.sent(name, key=key, topic=topic), key=key, topic=topic)
                for group in (TICKETS, MAIL) if topic == PAID else ():
                    world.done(name, sequence, group, age_ms=HOUR_MS)
    settings = world.write(database, folder)
    rules, like = [], replace(settings.rules[0], key_column="code", time_column="at_us", where=[])
    engine = create_engine(database.url)
    try:
        with engine.begin() as connection:
            for number, (topic, (pairs, collation)) in enumerate(keys.items()):
                table, collate = f"bookings_{number}", f"COLLATE {collation}" if collation else ""
                charset = "CHARACTER SET utf8mb4" if collation else ""
                connection.execute(
                    text(f"CREATE TABLE {table} (code VARCHAR(32) {charset} {collate} NOT NULL, at_us BIGINT NOT NULL)")
                )
                values = [{"code": row, "at_us": (NOW_MS - HOUR_MS) * 1000} for row, _ in pairs if row is not None]
                connection.execute(text(f"INSERT INTO {table} (code, at_us) VALUES (:code, :at_us)"), values)
                rules.append(replace(like, name=table, table=table, topic=topic))
    finally:
        engine.dispose()
    return replace(settings, rules=rules)
