"""One run over many instances, schemas, split tables and archives that were moved to Parquet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import OutboxSource, Settings, State, run
from spark_reconcile.core.settings_file import settings_of
from spark_reconcile.core.time_buckets import Span
from spark_reconcile.load.read_plan import check_sources
from spark_reconcile.sources.sql_statements import ARCHIVE_COLUMNS, InputKind
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_two_instances_and_a_parquet_archive_that_a_url_names_are_one_run(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    first, second = _world(6), World(last_order=100)
    second.stored, second.actions, second.sequences = first.stored, first.actions, first.sequences
    for _ in range(4):
        second.settled(age_ms=HOUR_MS)
    second.unsent("left-behind", key=str(second.order()))
    other = Database(name="sqlite", url=f"sqlite:///{tmp_path / 'other.db'}", schema=None)
    settings = first.write(sqlite, tmp_path)
    moved, second.archive = second.archive[:3], second.archive[3:]
    second.write_tables(other)
    first.inbox += second.inbox
    first.write_tables(sqlite)
    (tmp_path / "moved").mkdir()
    pq.write_table(pa.Table.from_pylist(moved), tmp_path / "moved" / "day.parquet")
    both = replace(settings, outboxes=[OutboxSource(url=other.url)], archives=[(tmp_path / "moved").as_uri()])

    summary = run(both, session=spark, now_ms=NOW_MS)

    assert (summary.business_rows, summary.messages) == (11, 11)
    assert {(one.scope, one.rule): one.count for one in summary.verdict_counts}["message", "stored"] == 10
    assert summary.count(State.UNSENT) == 1
    assert summary.sentence == "Not balanced: 1 unsent."


def test_split_message_tables_are_found(mysql_like: Database, tmp_path: Path) -> None:
    settings = _world(3).write(mysql_like, tmp_path)
    engine = create_engine(mysql_like.url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {mysql_like.schema}.message_0007 LIKE {mysql_like.schema}.message"))
        connection.execute(text(f"CREATE TABLE {mysql_like.schema}.message_notes LIKE {mysql_like.schema}.message"))
    engine.dispose()

    statements = [one for read in check_sources(settings).rest for one in read.statements]

    live = [one.table for one in statements if one.input_kind is InputKind.OUTBOX]
    assert [table.rpartition(".")[2] for table in live] == ["`message`", "`message_0007`"]


def test_a_span_bounds_what_is_read_but_never_what_is_unsent(mysql_like: Database, tmp_path: Path) -> None:
    world = _world(10)
    world.unsent("old", key=None, age_ms=300 * HOUR_MS)
    settings = world.write(mysql_like, tmp_path)
    span = Span(since_ms=NOW_MS - 2 * HOUR_MS + 2 * MINUTE_MS, until_ms=NOW_MS - 2 * HOUR_MS + 5 * MINUTE_MS)

    rows = _rows(settings, span)

    assert [rows.count(input_kind) for input_kind in (InputKind.OUTBOX, InputKind.ARCHIVE, InputKind.BUSINESS)] == [
        1,
        3,
        3,
    ]
    assert rows.count(InputKind.INBOX) == 8


@pytest.mark.parametrize("kind", ["DATETIME(6)", "BIGINT"])
def test_a_span_on_business_times_of_every_type(mysql_like: Database, tmp_path: Path, kind: str) -> None:
    settings = _world(1).write(mysql_like, tmp_path)
    values = ["1767323045000000", "1767323046000000"]
    if kind != "BIGINT":
        values = ["'2026-01-02 03:04:05'", "'2026-01-02 03:04:06'"]
    engine = create_engine(mysql_like.url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE paid (id INT PRIMARY KEY, at {kind} NULL)"))
        connection.execute(text(f"INSERT INTO paid VALUES (1, {values[0]}), (2, {values[1]})"))
    engine.dispose()
    rule = replace(settings.rules[0], table="paid", time_column="at", where=[])
    span = Span(since_ms=1_767_323_046_000, until_ms=1_767_323_047_000)

    rows = _rows(replace(settings, rules=[rule]), span)

    assert rows.count(InputKind.BUSINESS) == 1


def test_a_file_names_many_outboxes_shards_and_archives(tmp_path: Path) -> None:
    tables = {
        "database": {"url": "sqlite:///a.db"},
        "broker": {"data": "data"},
        "outboxes": [{"url": "sqlite:///b.db"}, {"url": "mysql://h/shop", "schema": ["o1", "o2"]}],
        "archive": {"parquet": ["archive/2026", "archive/2025"]},
        "rules": [
            {"name": "r", "table": "t", "key_column": "k", "time_column": "c", "topic": "p"},
            {"name": "s", "table": "t", "key_column": "k", "time_column": "c", "topic": "p", "url": ["sqlite:///c.db"]},
        ],
    }

    settings = settings_of(tables, folder=tmp_path)

    assert [(one.url, one.schema) for one in settings.all_outboxes] == [
        ("sqlite:///a.db", None), ("sqlite:///b.db", None), ("mysql://h/shop", "o1"), ("mysql://h/shop", "o2"),
    ]  # fmt: skip
    assert settings.urls_of(settings.rules[0]) == ["sqlite:///a.db", "sqlite:///b.db", "mysql://h/shop"]
    assert settings.urls_of(settings.rules[1]) == ["sqlite:///c.db"]
    assert list(settings.archives) == [tmp_path / "archive" / "2026", tmp_path / "archive" / "2025"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"outboxes": [{"url": "sqlite:///a.db"}]}, "same url and schema"),
        ({"archive": {"parquet": [1]}}, "a text, or a list of texts"),
    ],
)
def test_sources_named_wrongly_are_refused(wrong: dict[str, object], told: str) -> None:
    tables = {"database": {"url": "sqlite:///a.db"}, "broker": {"data": "data"}, **wrong}

    with pytest.raises(ConfigurationError, match=told):
        settings_of(tables)


@pytest.mark.spark
def test_an_archive_without_a_column_is_refused_by_name(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    settings = replace(_world(1).write(sqlite, tmp_path), archives=[tmp_path / "moved"])
    with pytest.raises(ConfigurationError, match="there is no folder"):
        check_sources(settings)
    (tmp_path / "moved").mkdir()
    columns = [pa.field(name, pa.int64()) for name in sorted(ARCHIVE_COLUMNS - {"body_sha256"})]
    pq.write_table(pa.schema(columns).empty_table(), tmp_path / "moved" / "day.parquet")

    with pytest.raises(ConfigurationError, match="no column body_sha256"):
        run(settings, session=spark, now_ms=NOW_MS)


def _world(count: int) -> World:
    world = World()
    world.groups()
    for number in range(count):
        world.settled(age_ms=2 * HOUR_MS - number * MINUTE_MS)
    return world


def _rows(settings: Settings, span: Span) -> list[str]:
    """The inputs of all rows that are read."""
    from spark_reconcile.sources.dbapi_reader import DatabaseAddress
    from spark_reconcile.sources.sql_source import Part, SqlReader

    plan, found = check_sources(settings, span=span, now_ms=NOW_MS), []
    for read in (*plan.inboxes, *plan.rest):
        reader = SqlReader(DatabaseAddress.of(read.url), list(read.statements), snapshot=True)
        for batch in reader.read(Part(tuple(range(len(read.statements))))):
            found += batch.column("input_kind").to_pylist()
    return found
