"""What the joins make of awkward records: late groups, repeated keys, cancels, purges, nulls, many of one kind."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StringType, StructType
from sqlalchemy import BigInteger, Column, MetaData, String, Table, create_engine, insert

from messaging.errors import DatabaseUnavailable
from spark_reconcile.config import BrokerSource, DatabaseSource, Grace, Settings
from spark_reconcile.evidence import Tables, business_verdicts, judged, message_evidence
from spark_reconcile.job import EXAMPLES_MAX, _examples, _policy, _worker_errors
from spark_reconcile.legs import _ARCHIVE, _MESSAGE
from spark_reconcile.sources.broker_log import ACTIONS_SCHEMA, MESSAGES_SCHEMA
from spark_reconcile.sources.sql import SqlReader
from spark_reconcile.verdict import Policy
from tests.fixtures.databases import Database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOUR_MS = 3_600_000
NOW_MS = 1_800_000_000_000
OLD_MS = NOW_MS - 10 * HOUR_MS
TOPIC, GROUP, LATER = "order.paid", "ledger", "search"
POLICY = Policy(now_ms=NOW_MS, fresh_after_ms=NOW_MS - 60_000, late_after_ms=60_000)


class Records:
    """Rows of each leg; what is not said is consistent."""

    def __init__(self) -> None:
        self.actions: list[tuple[Any, ...]] = []
        self.stored: list[tuple[Any, ...]] = []
        self.archive: list[tuple[Any, ...]] = []
        self.inboxes: list[tuple[Any, ...]] = []
        self.business: list[tuple[Any, ...]] = []

    def declare(self, group: str, *, at_ms: int = OLD_MS, position: int = 0) -> None:
        self.actions.append(("declared", TOPIC, group, None, position, at_ms, None, None, None))

    def message(self, name: str, *, sequence: int = 0, at_ms: int = OLD_MS, archived: bool = True) -> None:
        self.stored.append((name, TOPIC, name, sequence, "hash", at_ms, at_ms, None))
        if archived:
            self.archive.append((name, "publish", TOPIC, name, "hash", None, at_ms * 1000, at_ms * 1000, 1, "stored"))

    def done(self, name: str, group: str, *, at_ms: int = OLD_MS + 10) -> None:
        for kind in ("delivered", "acked"):
            self.actions.append((kind, TOPIC, group, name, 0, at_ms, None, 1, None))

    def cancel(self, name: str) -> None:
        self.actions.append(("canceled", None, None, name, None, OLD_MS, None, None, None))

    def tables(self, spark: SparkSession) -> Tables:
        return Tables(
            inboxes=spark.createDataFrame(self.inboxes, "id string, group string, handled_ms bigint"),
            actions=spark.createDataFrame(self.actions, ACTIONS_SCHEMA),
            stored=spark.createDataFrame(self.stored, MESSAGES_SCHEMA),
            outbox=spark.createDataFrame([], _MESSAGE),
            archive=spark.createDataFrame(self.archive, _ARCHIVE),
            business=spark.createDataFrame(self.business, "rule string, topic string, key string, at_ms bigint"),
        )


@pytest.mark.spark
def test_a_group_owes_nothing_before_its_first_message_and_is_not_late_before_it_was_made(spark: SparkSession) -> None:
    records = Records()
    records.declare(GROUP)
    records.declare(LATER, at_ms=NOW_MS - HOUR_MS, position=1)
    records.declare(LATER, at_ms=NOW_MS - 10, position=9)  # its settings changed
    for sequence, name in enumerate(("before", "backlog", "waiting")):
        records.message(name, sequence=sequence)
        records.done(name, GROUP)
    records.done("backlog", LATER, at_ms=NOW_MS - HOUR_MS + 10)

    found = _verdicts(spark, records)

    assert found == {
        ("before", GROUP): "settled", ("backlog", GROUP): "settled", ("waiting", GROUP): "settled",
        ("before", LATER): "settled", ("backlog", LATER): "settled", ("waiting", LATER): "late",
    }  # fmt: skip


@pytest.mark.spark
def test_what_may_have_been_purged_is_unknown_and_never_lost_or_a_phantom(spark: SparkSession) -> None:
    records = Records()
    records.declare(GROUP)
    records.message("kept", sequence=0)
    records.message("purged", sequence=1, at_ms=OLD_MS - 1, archived=False)
    records.message("phantom", sequence=2, archived=False)
    records.message("forgotten", sequence=3)
    for name in ("kept", "purged", "phantom"):
        records.done(name, GROUP)
        records.inboxes.append((name, GROUP, OLD_MS + 10))
    records.done("forgotten", GROUP, at_ms=OLD_MS + 5)
    policy = Policy(
        now_ms=NOW_MS, fresh_after_ms=NOW_MS, late_after_ms=60_000, archive_since_ms=OLD_MS, inbox_since_ms=OLD_MS + 9
    )

    found = _verdicts(spark, records, policy=policy, inbox_groups=[GROUP])

    assert {name: verdict for (name, _), verdict in found.items()} == {
        "kept": "settled", "purged": "unknown", "phantom": "phantom", "forgotten": "unknown"
    }  # fmt: skip


@pytest.mark.spark
def test_another_order_of_rows_and_one_more_balanced_message_change_no_verdict(
    spark: SparkSession, random_seed: int
) -> None:
    records = Records()
    records.declare(GROUP)
    for sequence, name in enumerate(("good", "waiting", "phantom", "canceled")):
        records.message(name, sequence=sequence, archived=name != "phantom")
        records.business.append(("rule", TOPIC, name, OLD_MS))
    records.done("good", GROUP)
    records.cancel("canceled")
    before = _verdicts(spark, records)
    assert before == {
        ("good", GROUP): "settled", ("waiting", GROUP): "late", ("phantom", GROUP): "phantom",
        ("canceled", GROUP): "canceled",
    }  # fmt: skip

    records.message("more", sequence=4)
    records.business.append(("rule", TOPIC, "more", OLD_MS))
    records.done("more", GROUP)
    for rows in (records.actions, records.stored, records.archive, records.business):
        Random(random_seed).shuffle(rows)

    assert _verdicts(spark, records) == {**before, ("more", GROUP): "settled"}


@pytest.mark.spark
def test_business_rows_are_counted_against_their_messages(spark: SparkSession) -> None:
    records = Records()
    young, old = NOW_MS - 1_000, OLD_MS
    for key, at_ms in (("one", old), ("pair", old), ("pair", old + 1), ("half", old), ("half", young), ("none", old),
                       ("young", young), ("twice", old), ("renewed", old), ("taken-back", old), (None, old),
                       ("timeless", None)):  # fmt: skip
        records.business.append(("rule", TOPIC, key, at_ms))
    for number, key in enumerate(("one", "pair", "pair", "half", "twice", "twice", "renewed", "renewed", "taken-back")):
        records.stored.append((f"m-{number}", TOPIC, key, number, "hash", old, old, None))
    records.cancel("m-6")
    records.cancel("m-8")
    tables = records.tables(spark)

    rows = business_verdicts(message_evidence(tables), tables.business, policy=POLICY).collect()

    assert sorted((row["key"] or "", row["at_ms"] or 0, row["verdict"]) for row in rows) == sorted(
        [
            ("one", old, "settled"), ("pair", old, "settled"), ("pair", old + 1, "settled"), ("half", old, "settled"),
            ("half", young, "pending"), ("none", old, "lost"), ("young", young, "pending"), ("twice", old, "duplicate"),
            ("renewed", old, "settled"), ("taken-back", old, "settled"), ("", old, "mismatch"), ("timeless", 0, "lost"),
        ]
    )  # fmt: skip


def test_the_grace_is_counted_back_from_now_with_the_clocks_skew_and_retention_with_a_margin() -> None:
    settings = Settings(
        database=DatabaseSource(url="sqlite:///x.db", archive_days=1, inbox_days=None),
        broker=BrokerSource(data="x"),
        grace=Grace(seconds=60, late_after_seconds=90, clock_skew_seconds=1.5),
    )

    policy = _policy(settings, now_ms=NOW_MS)

    assert policy == Policy(
        now_ms=NOW_MS, fresh_after_ms=NOW_MS - 61_500, late_after_ms=90_000,
        archive_since_ms=NOW_MS - 23 * HOUR_MS, inbox_since_ms=0,
    )  # fmt: skip


@pytest.mark.spark
def test_many_findings_of_one_kind_hide_none_of_another(spark: SparkSession) -> None:
    rows = [(f"e-{number}", "early", number) for number in range(5 * EXAMPLES_MAX)] + [("l-0", "lost", 0)]
    frame = spark.createDataFrame(rows, "id string, verdict string, created_ms bigint")

    shown = _examples(frame, order="created_ms, id")

    assert [one["id"] for one in shown] == [*(f"e-{number}" for number in range(EXAMPLES_MAX)), "l-0"]


@pytest.mark.spark
def test_a_database_that_a_worker_cannot_read_is_said_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    source = spark.read.format("outbox_sql").schema("a bigint").option("table", "t").option("range_column", "a")
    missing = source.option("url", f"sqlite:///{tmp_path / 'gone.db'}").load()

    with pytest.raises(DatabaseUnavailable, match=r"cannot read the database .*gone\.db") as refused, _worker_errors():
        missing.collect()

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("partitions", ["1", "4"])
def test_ranges_together_hold_each_row_once_also_those_without_a_number(database: Database, partitions: str) -> None:
    _make_numbers(database)
    options = {"url": database.url, "table": "numbers", "range_column": "a", "partitions": partitions}
    reader = SqlReader(options, StructType().add("a", LongType()).add("b", StringType()))

    read = [
        row
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in zip(*batch.to_pydict().values(), strict=True)
    ]

    expected = [(number, f"ключ <{number}> 🙂") for number in range(99)] + [(None, "no number"), (7, None)]
    assert sorted(read, key=repr) == sorted(expected, key=repr)


def _make_numbers(database: Database) -> None:
    table = Table("numbers", MetaData(), Column("a", BigInteger), Column("b", String(64)), mysql_charset="utf8mb4")
    engine = create_engine(database.url)
    with engine.begin() as connection:
        table.create(connection)
        rows = [{"a": number, "b": f"ключ <{number}> 🙂"} for number in range(99)]
        connection.execute(insert(table), [*rows, {"a": None, "b": "no number"}, {"a": 7, "b": None}])
    engine.dispose()


def _verdicts(
    spark: SparkSession, records: Records, *, policy: Policy = POLICY, inbox_groups: list[str] | None = None
) -> dict[tuple[str, str], str]:
    tables = records.tables(spark)
    rows: DataFrame = judged(message_evidence(tables), tables, inbox_groups=inbox_groups or [], policy=policy)
    return {(row["id"], row["group"]): row["verdict"] for row in rows.collect()}
