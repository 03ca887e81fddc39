"""Sealed segments are decoded once: what was kept of them gives the same rows, and only while they are the same."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.block import SEGMENT_HEAD_BYTES, SegmentHead, SegmentKind
from spark_reconcile import NotComparable, Settings, run, run_windows
from spark_reconcile.core.errors import OutputBusy
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.load.source_reader import SEGMENTS, read_log
from spark_reconcile.load.spark_session import PINNED, pinned_session
from spark_reconcile.results.output_folder import staging
from spark_reconcile.runs.reconciliation import only_run
from spark_reconcile.sources.broker_logs import survey
from tests.fixtures.databases import Database
from tests.outbox_broker.message_log import stored_messages
from tests.spark_reconcile.message_log import append_messages, logged
from tests.spark_reconcile.world import HOUR_MS, MINUTE_MS, NOW_MS, World, archived, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS_A_SEGMENT = 4
OTHERWISE = {
    "true": "false", "false": "true", "UTC": "Asia/Tokyo", "TIMESTAMP_MICROS": "INT96",
    "TIMESTAMP_LTZ": "TIMESTAMP_NTZ",
}  # fmt: skip
"""What a shop's Spark may have in place of what is pinned."""


@pytest.fixture
def written(sqlite: Database, tmp_path: Path) -> Settings:
    """Ten settled messages in segments of four records, all worth keeping."""
    world = World()
    world.groups()
    for number in range(10):
        world.settled(age_ms=2 * HOUR_MS - number * MINUTE_MS)
    settings = world.write(sqlite, tmp_path, records_a_segment=RECORDS_A_SEGMENT)
    return replace(settings, limits=RunLimits(kept_segment_bytes_min=0))


@pytest.mark.spark
def test_a_second_run_reads_sealed_segments_from_what_the_first_one_kept(
    spark: SparkSession, written: Settings
) -> None:
    first = run(written, session=spark, now_ms=NOW_MS)
    files = sorted(path for log in ("messages", "actions") for path in _kept(written, log))
    segments = [one for log in ("messages", "actions") for one in survey(written.broker_data, log)]
    for one in segments:  # what is read in place from now on would be seen to be damaged
        path = Path(one.path)
        data = path.read_bytes()
        path.write_bytes(data if one.last else data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(one.changed_ns, one.changed_ns))  # a disk that forgets tells no time

    second = run(written, session=spark, now_ms=NOW_MS)

    assert len(files) == len(segments) - 2
    assert first.balanced
    assert (second.verdict_counts, second.latencies, second.messages) == (
        first.verdict_counts,
        first.latencies,
        first.messages,
    )
    assert sorted(path for log in ("messages", "actions") for path in _kept(written, log)) == files


@pytest.mark.spark
def test_a_segment_that_is_another_one_is_read_again_and_a_dropped_one_is_forgotten(
    spark: SparkSession, written: Settings, tmp_path: Path
) -> None:
    folder, kept = written.broker_data / "messages", tmp_path / "kept"
    before = survey(written.broker_data, "messages")
    counts: list[InputCount] = []
    read_log(spark, "messages", before, counts, kept=kept)
    first, *others = [Path(one.path) for one in before]
    head = SegmentHead(kind=SegmentKind.MESSAGES, epoch=1, first=before[1].first_offset, created_at_ms=NOW_MS)
    first.unlink()
    others[0].write_bytes(head.encode() + others[0].read_bytes()[SEGMENT_HEAD_BYTES:])

    rows = read_log(spark, "messages", survey(written.broker_data, "messages"), counts, kept=kept).frame
    read_log(spark, "messages", survey(written.broker_data, "messages"), counts, kept=kept)

    assert rows.count() == 10 - RECORDS_A_SEGMENT
    assert len(before) == 3
    (name,) = (path.name for path in kept.iterdir())
    assert str(NOW_MS) in name
    assert len(list(folder.iterdir())) == 2


@pytest.mark.spark
def test_a_segment_restored_from_a_copy_that_went_another_way_is_read_again(
    spark: SparkSession, written: Settings, tmp_path: Path
) -> None:
    segments = survey(written.broker_data, "messages")
    path = Path(segments[0].path)
    read_log(spark, "messages", segments, [], kept=tmp_path / "kept")
    whole, (stored, *_) = path.read_bytes(), stored_messages(path)
    lost = stored.record.id
    path.write_bytes(whole[:SEGMENT_HEAD_BYTES])
    append_messages(path, [msgspec.structs.replace(logged(stored), id="x" * len(lost))])
    path.write_bytes(path.read_bytes() + whole[stored.end :])

    now = survey(written.broker_data, "messages")
    rows = read_log(spark, "messages", now, [], kept=tmp_path / "kept").frame

    assert [(one.size_bytes, one.created_at_ms) for one in now] == [
        (one.size_bytes, one.created_at_ms) for one in segments
    ]
    assert rows.where(f"id = '{lost}'").count() == 0


@pytest.mark.spark
def test_nothing_is_kept_of_a_log_that_is_damaged(spark: SparkSession, written: Settings) -> None:
    path = Path(survey(written.broker_data, "messages")[0].path)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    with pytest.raises(Exception, match="damaged"):
        run(written, session=spark, now_ms=NOW_MS)

    assert _kept(written, "messages") == []


@pytest.mark.spark
def test_what_a_power_cut_left_of_a_kept_file_is_made_again(
    spark: SparkSession, written: Settings, tmp_path: Path
) -> None:
    segments = survey(written.broker_data, "messages")
    read_log(spark, "messages", segments, [], kept=tmp_path / "kept")
    whole = {path: path.stat().st_size for path in (tmp_path / "kept").iterdir()}
    empty, half = whole
    os.truncate(empty, 0)
    os.truncate(half, whole[half] // 2)

    rows = read_log(spark, "messages", segments, [], kept=tmp_path / "kept").frame

    assert rows.count() == 10
    assert {path: path.stat().st_size for path in (tmp_path / "kept").iterdir()} == whole


@pytest.mark.spark
def test_a_kept_file_is_on_the_disk_before_it_has_its_name(
    spark: SparkSession, written: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)

    read_log(spark, "messages", survey(written.broker_data, "messages"), [], kept=tmp_path / "kept")

    *files, folder = synced
    assert [path.parent.parent for path in files] == [tmp_path / "kept"] * len(list((tmp_path / "kept").iterdir()))
    assert folder == tmp_path / "kept"


@pytest.mark.spark
@pytest.mark.parametrize("by_the_hour", [False, True])
def test_a_kept_file_that_is_damaged_in_any_byte_is_made_again(
    spark: SparkSession, written: Settings, by_the_hour: bool
) -> None:
    kept = written.output / SEGMENTS / "messages"
    read_log(spark, "messages", survey(written.broker_data, "messages"), [], kept=kept)
    zeroed, flipped = _kept(written, "messages")
    data = zeroed.read_bytes()
    zeroed.write_bytes(data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :])
    data = flipped.read_bytes()
    place = data.index(b"good-")
    flipped.write_bytes(data[:place] + b"gone-" + data[place + 5 :])

    if by_the_hour:
        summary = run_windows(
            written, since_ms=NOW_MS - 4 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=no_wait
        )  # fmt: skip
    else:
        summary = run(written, session=spark, now_ms=NOW_MS)

    assert summary.balanced, summary.sentence
    assert b"good-" in flipped.read_bytes()


@pytest.mark.spark
def test_a_source_that_is_damaged_ends_the_run_as_not_comparable_whatever_the_session_ignores(
    spark: SparkSession, written: Settings, tmp_path: Path
) -> None:
    """A lost message in a damaged file would be missing in silence; a shop's Spark may be told to ignore such files."""
    world = World()
    world.sent("lost", key=None, topic="other")
    settings = archived(written, tmp_path / "moved", world.archive)
    path = settings.archives[0] / "part.parquet"  # type: ignore[operator]
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(len(data) // 4) + data[4 + len(data) // 4 :])
    ignoring = {name: OTHERWISE[value] for name, value in PINNED.items()} | {"fs.secret": "of the session alone"}
    for name, value in ignoring.items():
        spark.conf.set(name, value)
    configured = dict(spark.conf.getAll)

    try:
        with pytest.raises(NotComparable, match=r"part.parquet.*: .*") as raised:
            run(settings, session=spark, now_ms=NOW_MS)
        balanced = run(written, session=spark, now_ms=NOW_MS)
        after = dict(spark.conf.getAll)
    finally:
        for name in ignoring:
            spark.conf.unset(name)
        for name, value in PINNED.items():
            spark.conf.set(name, value)

    assert len(str(raised.value).splitlines()) == 1
    assert balanced.balanced, balanced.sentence
    assert after == configured


def test_a_session_of_spark_connect_whose_settings_decide_verdicts_is_refused_by_their_names() -> None:
    """A server's session is the only one that there is: it is asked, and not changed."""

    class Configured:
        def get(self, name: str, default: str | None) -> str | None:
            return "true" if name == "spark.sql.files.ignoreCorruptFiles" else PINNED.get(name, default)

    class Remote:
        conf = Configured()

    with pytest.raises(ConfigurationError, match=r"has spark\.sql\.files\.ignoreCorruptFiles=true, .*set it to false"):
        pinned_session(Remote())  # type: ignore[arg-type]


@pytest.mark.spark
def test_a_segment_is_kept_whole_where_a_session_limits_the_rows_of_a_file(
    spark: SparkSession, written: Settings, tmp_path: Path
) -> None:
    segments = survey(written.broker_data, "messages")
    spark.conf.set("spark.sql.files.maxRecordsPerFile", "1")
    try:
        read_log(spark, "messages", segments, [], kept=tmp_path / "kept")
    finally:
        spark.conf.unset("spark.sql.files.maxRecordsPerFile")

    rows = read_log(spark, "messages", segments, [], kept=tmp_path / "kept").frame

    assert rows.count() == 10


@pytest.mark.spark
def test_what_a_killed_run_had_begun_to_keep_is_removed(spark: SparkSession, written: Settings, tmp_path: Path) -> None:
    stage = tmp_path / "kept" / ".0123456789abcdef"
    stage.mkdir(parents=True)
    (stage / "part-00000-begun.parquet").write_bytes(b"PAR1")

    read_log(spark, "messages", survey(written.broker_data, "messages"), [], kept=tmp_path / "kept")

    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert not stage.exists()


def test_what_a_killed_run_had_begun_to_write_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".staging-20270115T080000Z-0a1b2c" / "verdicts"
    left.mkdir(parents=True)
    (left / "part-00000-begun.parquet").write_bytes(b"PAR1")

    with staging(tmp_path, now_ms=NOW_MS) as stage:
        assert list(tmp_path.iterdir()) == [stage.folder]


def test_a_whole_run_writes_to_no_folder_that_another_run_writes_to(written: Settings) -> None:
    with only_run(written.output), pytest.raises(OutputBusy, match="another run writes"):
        run(written, now_ms=NOW_MS)


def _kept(settings: Settings, log: str) -> list[Path]:
    return sorted((settings.output / SEGMENTS / log).glob("*"))
