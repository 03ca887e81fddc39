"""Every file of a Parquet archive is read, or refused: a message in what Spark passes over would be lost in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.sources.parquet_archives import (
    ARCHIVE_COLUMNS,
    ParquetArchive,
    check_archive,
    read_archive,
    refuse_misread,
)
from spark_reconcile.sources.parquet_archives import (
    MISREAD as MISREAD_LEG,
)
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, World, no_wait, sha

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBERS = ("deliver_at_ms", "created_at_us", "sent_at_us", "attempts")


def _row(message: str = "m", **columns: Any) -> dict[str, Any]:
    return {
        "id": message, "kind": "publish", "topic": PAID, "message_key": "1", "body_sha256": sha(message),
        "deliver_at_ms": None, "created_at_us": (NOW_MS - HOUR_MS) * 1000, "sent_at_us": (NOW_MS - HOUR_MS + 15) * 1000,
        "attempts": 1, "outcome": "stored", **columns,
    }  # fmt: skip


def _table(*rows: dict[str, Any], **types: pa.DataType) -> pa.Table:
    columns = {
        name: pa.array([row[name] for row in rows], types.get(name, pa.int64() if name in NUMBERS else pa.string()))
        for name in rows[0]
    }
    return pa.table(columns)


def _write(path: Path, *rows: dict[str, Any], **types: pa.DataType) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(_table(*(rows or (_row(),)), **types), path)


# -- files -------------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    _write(path)
    path.write_bytes(path.read_bytes()[:-20])


def _linked_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "gone")


PASSED_OVER: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "in a subfolder": ("2025/day.parquet", _write, r"2025/ is no partition \(name=value\)"),
    "beside partitions": ("dt=2025-01-01/day.parquet", _write, "is not in folders of no partition, as others are"),
    "named with _": ("_day.parquet", _write, "Spark passes over _day.parquet for its name"),
    "named with .": (".day.parquet", _write, "Spark passes over .day.parquet for its name"),
    "named like a marker, and of rows": ("_committed_1", _write, "Spark passes over _committed_1 for its name"),
    "named like a checksum, and of rows": (".day.crc", _write, "Spark passes over .day.crc for its name"),
    "a summary with rows": ("_metadata", _write, "Spark passes over _metadata for its name"),
    "unknown, and hidden": (".day.swp", lambda path: path.write_text("x"), "Spark passes over .day.swp for its name"),
    "of a write that did not end": ("_temporary/0/day.parquet", _write, "_temporary/0/ is of a write that did not end"),
    "of a table format": ("_delta_log/0.json", lambda path: path.write_text("{}"), "_delta_log/ is of .* table format"),
    "of zero bytes": ("empty.parquet", Path.touch, "empty.parquet has no byte"),
    "still being copied by Hadoop": ("day.parquet._COPYING_", _write, "is still being copied"),
    "still being copied": ("copied.parquet", _cut, "copied.parquet is no whole Parquet file"),
    "of another format": ("read.me", lambda path: path.write_text("x"), "read.me is no whole Parquet file"),
    "linked to nothing": ("linked.parquet", _linked_to_nothing, "linked.parquet of the archive: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", PASSED_OVER)
def test_a_file_that_spark_would_pass_over_is_refused_by_name_with_the_cure(tmp_path: Path, case: str) -> None:
    name, write, told = PASSED_OVER[case]
    _write(tmp_path / "day.parquet")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path / name)

    with pytest.raises(NotComparable, match=told):
        check_archive(tmp_path)
    with pytest.raises(NotComparable, match=told):
        check_archive(tmp_path.as_uri())


def test_markers_and_summaries_without_rows_are_passed_over(tmp_path: Path) -> None:
    _write(tmp_path / "dt=1" / "hour=2" / "part-0.parquet")
    _write(tmp_path / "dt=1" / "hour=3" / "part-0.parquet")
    for name in ("_SUCCESS", "._SUCCESS.crc", "_committed_7", "_started_7", ".DS_Store"):
        (tmp_path / name).write_text("")
    (tmp_path / "dt=1" / "hour=2" / ".part-0.parquet.crc").write_bytes(b"crc\0")
    pq.write_metadata(_table(_row()).schema, tmp_path / "_common_metadata")
    (tmp_path / "_temporary" / "0").mkdir(parents=True)

    check_archive(tmp_path)


COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is a double": ({"message_key": (1.0, pa.float64())}, "message_key is of type double"),
    "an id that is a double": ({"id": (1.0, pa.float64())}, "column id is of type double"),
    "an id that is a number": ({"id": (1, pa.int64())}, "column id is of type int64"),
    "a time that is a double": ({"created_at_us": (1e15, pa.float64())}, "created_at_us is of type double"),
    "a time that is a timestamp": ({"sent_at_us": (1, pa.timestamp("us"))}, r"sent_at_us is of type timestamp\[us\]"),
    "a fraction": ({"attempts": (1, pa.decimal128(20, 2))}, r"attempts is of type decimal128\(20, 2\)"),
    "a column of nothing that is never null": ({"sent_at_us": (None, pa.null())}, "sent_at_us is of type null"),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_of_a_type_that_cannot_be_compared_is_refused_at_the_start(tmp_path: Path, case: str) -> None:
    columns, told = COLUMNS[case]
    _write(tmp_path / "day.parquet")
    values = {name: value for name, (value, _) in columns.items()}
    _write(tmp_path / "other.parquet", _row(**values), **{name: kind for name, (_, kind) in columns.items()})

    with pytest.raises(ConfigurationError, match=f"{told}.*other.parquet"):
        check_archive(tmp_path)


def test_a_column_that_one_of_the_files_lacks_is_refused_and_one_that_stands_twice(tmp_path: Path) -> None:
    _write(tmp_path / "a" / "day.parquet")
    pq.write_table(_table(_row()).drop_columns(["deliver_at_ms"]), tmp_path / "a" / "older.parquet")
    _write(tmp_path / "b" / "kind=publish" / "day.parquet")

    with pytest.raises(ConfigurationError, match="no column deliver_at_ms in older"):
        check_archive(tmp_path / "a")
    with pytest.raises(ConfigurationError, match="has the column kind in it, and in the names of its folders"):
        check_archive(tmp_path / "b")


# -- rows --------------------------------------------------------------------------------------------------------------


INEXACT = r"deliver_at_ms \(double\) is not whole, or beyond 2\^53"
MISREAD: dict[str, tuple[dict[str, Any], dict[str, pa.DataType], str]] = {
    "kind is null": ({"kind": None}, {}, r"kind \(string\) is null"),
    "kind in capitals": ({"kind": "PUBLISH"}, {}, r"kind \(string\) is neither publish nor cancel"),
    "kind unknown": ({"kind": "snapshot"}, {}, r"kind \(string\) is neither publish nor cancel"),
    "created is null": ({"created_at_us": None}, {}, r"created_at_us \(bigint\) is null"),
    "id is null": ({"id": None}, {}, r"id \(string\) is null"),
    "due is no whole number": ({"deliver_at_ms": 1.5}, {"deliver_at_ms": pa.float64()}, INEXACT),
    "due is inexact": ({"deliver_at_ms": 2.0**53 + 2}, {"deliver_at_ms": pa.float64()}, INEXACT),
}  # fmt: skip


@pytest.mark.spark
def test_rows_that_are_not_understood_are_counted_and_refused_with_file_and_column(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    settings = replace(_world().write(sqlite, tmp_path), archives=[tmp_path / "moved"])
    _write(tmp_path / "moved" / "day.parquet", _row("good"))
    for number, (columns, types, _) in enumerate(MISREAD.values()):
        wrong = _row("lost", **columns)
        _write(tmp_path / "moved" / f"day {number}.parquet", wrong, {**wrong, "id": wrong["id"] and "too"}, **types)
    archive = read_archive(spark, tmp_path / "moved")

    counted = archive.frame.where(f"input_kind = '{MISREAD_LEG}'").groupBy("topic").count().collect()

    told = sorted((row["topic"], row["count"]) for row in counted)
    assert [count for _, count in told] == [2] * len(MISREAD)
    for number, ((place, _), (_, _, wrong_with)) in enumerate(zip(told, MISREAD.values(), strict=True)):
        assert re.fullmatch(f"file:.*/day%20{number}.parquet: {wrong_with}", place), place
    for judge in (lambda: run(settings, session=spark, now_ms=NOW_MS), lambda: _by_the_hour(settings, spark)):
        with pytest.raises(NotComparable, match=r"not understood.*2 rows of file:.*day%200.parquet: .*; and 4 more"):
            judge()


@pytest.mark.parametrize(("read", "is_whole", "is_refused"), [(3, True, True), (3, False, False), (4, True, False)])
def test_rows_that_a_footer_counts_and_spark_did_not_return_are_refused(
    tmp_path: Path, read: int, is_whole: bool, is_refused: bool
) -> None:
    none: Any = None
    archive = ParquetArchive(folder=tmp_path, frame=none, understood=none, files=none, rows=4)
    told = f"the archive {tmp_path} has 4 rows, and Spark read 3 of them, so nothing is judged"

    with pytest.raises(NotComparable, match=told) if is_refused else nullcontext():
        refuse_misread(archive, {}, rows=read, is_whole=is_whole)


SENTINELS: dict[str, tuple[dict[str, Any], str]] = {
    "due at the largest number of 64 bits": ({"deliver_at_ms": 2**64 - 1}, "due_differs"),
    "due at the largest with a sign": ({"deliver_at_ms": 2**63 - 1}, "due_differs"),
    "created at the largest number of 64 bits": ({"created_at_us": 2**64 - 1}, "stored"),
    "created in 2300": ({"created_at_us": 10_413_792_000_000_000}, "stored"),
    "created at 0": ({"created_at_us": 0}, "stored"),
    "sent at the largest number of 64 bits": ({"sent_at_us": 2**64 - 1}, "stored"),
}  # fmt: skip


@pytest.mark.spark
def test_a_number_or_a_time_that_cannot_be_true_is_one_row_s_verdict_whole_and_by_the_hour(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world, rows = _world(), []
    for number, (columns, _) in enumerate(SENTINELS.values()):
        world.store(f"s-{number}", key=None, topic="other")
        rows.append(_row(f"s-{number}", topic="other", message_key=None, **columns))
    rows.append(_row("lost", topic="other", message_key=None))
    unsigned = dict.fromkeys(("deliver_at_ms", "created_at_us", "sent_at_us"), pa.uint64())
    _write(tmp_path / "moved" / "day.parquet", *rows, **unsigned)
    settings = replace(world.write(sqlite, tmp_path), archives=[tmp_path / "moved"], complete_since_ms=1)

    expected = {(f"s-{number}", rule) for number, (_, rule) in enumerate(SENTINELS.values())}
    for summary in (run(settings, session=spark, now_ms=NOW_MS, pause=no_wait), _by_the_hour(settings, spark)):
        counts = {one.rule: one.count for one in summary.verdict_counts if one.topic == "other"}
        assert {(one.id, one.rule) for one in summary.examples if one.scope == "message"} == {
            ("lost", "not_in_broker"), *(one for one in expected if one[1] != "stored"),
        }  # fmt: skip
        assert counts == {"due_differs": 2, "stored": 4, "not_in_broker": 1}
        (note,) = [one.note for one in summary.inputs if one.source == "archive"]
        assert "have a time that cannot be true" in note


@pytest.mark.spark
def test_files_of_every_kind_that_is_understood_are_read_to_the_last_row_whole_and_by_the_hour(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    """Each message that is only here is lost: whatever is not read would be missing."""
    folder = tmp_path / "moved"
    due_ms = NOW_MS + HOUR_MS
    _write(folder / "topic=other" / "a-1.parquet", *_without("topic", _row("plain")))
    _write(
        folder / "topic=other" / "b of pandas.parquet",
        *_without("topic", _row("nan", deliver_at_ms=float("nan")), _row("due", deliver_at_ms=float(due_ms))),
        deliver_at_ms=pa.float64(),
    )
    _write(
        folder / "topic=007" / "c.parquet",
        *_without("topic", _row("nothing", message_key=None)), deliver_at_ms=pa.null(), message_key=pa.null(),
        attempts=pa.int8(), created_at_us=pa.uint64(), id=pa.dictionary(pa.int32(), pa.string()),
    )  # fmt: skip
    settings = replace(_world().write(sqlite, tmp_path), archives=[folder])

    found = read_archive(spark, folder)
    whole, by_the_hour = run(settings, session=spark, now_ms=NOW_MS), _by_the_hour(settings, spark)

    rows = {(row["id"], row["topic"], row["message_key"], row["deliver_at_ms"]) for row in found.frame.collect()}
    assert rows == {
        ("plain", "other", "1", None), ("nan", "other", "1", None), ("due", "other", "1", due_ms),
        ("nothing", "007", None, None),
    }  # fmt: skip
    assert found.understood.exceptAll(found.frame).isEmpty()
    assert found.understood.count() == len(rows)
    assert found.rows == 4
    for summary in (whole, by_the_hour):
        counts = {(one.topic, one.rule): one.count for one in summary.verdict_counts if one.scope == "message"}
        assert counts == {("other", "not_in_broker"): 3, ("007", "not_in_broker"): 1, (PAID, "stored"): 2}


@pytest.mark.spark
def test_an_archive_behind_a_url_is_listed_and_checked_like_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    """By a file system of Hadoop's own, whose links lead to a folder here."""
    _write(tmp_path / "moved" / "dt=1" / "a day.parquet", _row("plain"))
    _write(tmp_path / "moved" / "dt=1" / "double.parquet", _row("nan", deliver_at_ms=1.0), deliver_at_ms=pa.float64())
    (tmp_path / "moved" / "_SUCCESS").touch()
    spark.conf.set("fs.viewfs.mounttable.cluster.link./moved", (tmp_path / "moved").as_uri())

    found = read_archive(spark, "viewfs://cluster/moved")

    assert {(row["id"], row["deliver_at_ms"]) for row in found.frame.collect()} == {("plain", None), ("nan", 1)}
    assert len(found.files.names) == 2
    assert found.files.read(found.files.names[:1]).count() == 1
    (tmp_path / "moved" / "dt=1" / "_temporary").touch()
    with pytest.raises(NotComparable, match="Spark passes over dt=1/_temporary for its name"):
        read_archive(spark, "viewfs://cluster/moved")


@pytest.mark.spark
def test_a_file_that_spark_does_not_open_by_its_name_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", _row("plain"))
    _write(tmp_path / "[a].parquet", _row("nan", deliver_at_ms=1.0), deliver_at_ms=pa.float64())

    with pytest.raises(NotComparable, match=r"reads other files .*\[a\].parquet \(not read\)"):
        read_archive(spark, tmp_path)


@pytest.mark.spark
@pytest.mark.parametrize("table", ["archive", "outbox"])
def test_rows_of_a_table_whose_kind_is_not_known_are_refused_and_not_dropped(
    spark: SparkSession, sqlite: Database, tmp_path: Path, table: str
) -> None:
    world = _world()
    for kind in ("PUBLISH", "snapshot"):
        if table == "archive":
            world.sent(f"lost-{kind}", key=None, topic="other")
            world.archive[-1]["kind"] = kind
        else:
            world.unsent(f"lost-{kind}", key=None, topic="other")
            world.outbox[-1]["kind"] = kind
    settings = world.write(sqlite, tmp_path)

    for judge in (lambda: run(settings, session=spark, now_ms=NOW_MS), lambda: _by_the_hour(settings, spark)):
        with pytest.raises(NotComparable, match=f"2 rows of the {table} have a kind that is neither publish nor canc"):
            judge()


def test_every_column_of_the_archive_is_in_these_rows() -> None:
    assert set(_row()) == set(ARCHIVE_COLUMNS)


def _without(name: str, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{column: value for column, value in row.items() if column != name} for row in rows]


def _world() -> World:
    world = World()
    world.groups()
    for _ in range(2):
        world.settled()
    return world


def _by_the_hour(settings: Settings, spark: SparkSession) -> Summary:
    return run_windows(
        replace(settings, complete_since_ms=1), since_ms=NOW_MS - 3 * HOUR_MS, now_ms=NOW_MS, session=spark,
        pause=no_wait,
    )  # fmt: skip
