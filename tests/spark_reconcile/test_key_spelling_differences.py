"""Keys that a database takes for equal and Spark does not are named as what they are, not as lost and phantom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.repair.plan import unpublished_rows
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World, no_wait

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
PADDED = 1
"""Of these pairs the collation of bytes calls one equal, too: it ignores blanks at the end, in MySQL and MariaDB."""
COLLATIONS = {"loose": "utf8mb4_unicode_ci", "strict": "utf8mb4_bin"}
Findings = dict[tuple[str, str, str, str], int]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a topic, as rows have them and as their messages were published, and the collation of their column.

    `topic`: the kind of the collation, and the database of the rows.
    """

    topic: str
    pairs: Sequence[Pair]
    database: Database
    collation: str = ""

    @property
    def kind(self) -> str:
        return self.topic.partition(".")[0]


def _respelled(pairs: int, *, lost: int = 1, phantom: int = 2) -> Findings:
    return {
        ("message", "key_spelling_differs", "mismatch", "finding"): pairs,
        ("business", "message_key_spelling_differs", "mismatch", "finding"): pairs,
        ("business", "no_message", "lost", "finding"): lost,
        ("message", "no_business_row", "phantom", "finding"): phantom,
    }


@pytest.mark.spark
def test_keys_that_the_collation_of_the_column_calls_equal_are_one_finding_and_nothing_is_called_lost(
    sqlite: Database, mariadb: Database, mysql: Database, tmp_path: Path, spark: SparkSession
) -> None:
    pairs = [*FOLDED, *ACCENTED, *OTHERS]
    count = len(FOLDED) + len(ACCENTED)
    columns = [Keys("folded.sqlite", [*FOLDED, *OTHERS], sqlite)]
    for database in (mariadb, mysql):
        for kind, collation in COLLATIONS.items():
            columns.append(Keys(f"{kind}.{database.name}", pairs, database, collation))
    settings = _with_text_keys(columns, sqlite, tmp_path)

    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    by_the_hour = run_windows(settings, since_ms=NOW_MS - 2 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait)

    strict = _respelled(PADDED, lost=1 + count - PADDED, phantom=2 + count - PADDED)
    wanted = {"folded": _respelled(len(FOLDED)), "loose": _respelled(count), "strict": strict}
    for summary in (whole, by_the_hour):
        for one in columns:
            assert _findings(summary, one.topic) == wanted[one.kind], one.topic
        assert summary.sentence == "Not balanced: 17 lost, 22 phantom, 19 mismatch."
    for folders in ([Path(whole.folder)], list((settings.output / "windows").glob("*/*"))):
        rows = [row for folder in folders for table in folder.glob("*verdicts") for row in _rows(table)]
        told = [row for row in rows if "key_spelling_differs" in row["rule"]]
        assert {(row["topic"], row["collation"]) for row in told} == {
            (one.topic, one.collation or "UTF8_LCASE_RTRIM") for one in columns
        }, "SQLite is not asked"
        assert {row["message_key"] for row in told if row["topic"].startswith("loose")} == {
            key for pair in (*FOLDED, *ACCENTED) for key in pair
        }  # fmt: skip
        assert all(row["confirmed"] for row in told if "message_id" in row)
        assert {row["collation"] for row in rows if row not in told} == {None}
    unpublished = {(one.topic, one.key) for one in unpublished_rows([Path(whole.folder)], rows_max=100)}
    for one in columns:
        keys = {key for topic, key in unpublished if topic == one.topic}
        if one.kind == "strict":
            assert len(keys) == 1 + count - PADDED
        else:
            assert keys == {"lost"}, "none is to be published again"


def _rows(table: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(table).to_pylist()
    return rows


def _findings(summary: Summary, topic: str) -> Findings:
    return {
        (str(one.scope), one.rule, str(one.state), str(one.severity)): one.count
        for one in summary.verdict_counts
        if one.severity == "finding" and one.topic == topic
    }


def _with_text_keys(columns: Sequence[Keys], outbox: Database, folder: Path) -> Settings:
    """Messages of all these topics, published from one database, and business rows with texts as keys in several."""
    world = World()
    for one in columns:
        for number, (_, key) in enumerate(one.pairs):
            if key is not None:
                world.store(world.sent(f"{one.topic}-{number}", key=key, topic=one.topic), key=key, topic=one.topic)
    settings = world.write(outbox, folder)
    rules, like = [], replace(settings.rules[0], key_column="code", time_column="at_us", where=[])
    for number, one in enumerate(columns):
        table = f"bookings_{number}"
        collate = f"CHARACTER SET utf8mb4 COLLATE {one.collation}" if one.collation else ""
        engine = create_engine(one.database.url)
        try:
            with engine.begin() as connection:
                connection.execute(
                    text(f"CREATE TABLE {table} (code VARCHAR(32) {collate} NOT NULL, at_us BIGINT NOT NULL)")
                )
                values = [{"code": row, "at_us": (NOW_MS - HOUR_MS) * 1000} for row, _ in one.pairs if row is not None]
                connection.execute(text(f"INSERT INTO {table} (code, at_us) VALUES (:code, :at_us)"), values)
        finally:
            engine.dispose()
        rules.append(replace(like, name=table, table=table, topic=one.topic, urls=[one.database.url]))
    return replace(settings, rules=rules, inboxes=[])
