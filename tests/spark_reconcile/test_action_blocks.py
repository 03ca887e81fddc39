"""The broker's actions are read from blocks: each once, whatever single bit is flipped, and never two as one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from outbox_core.journal.block import BLOCK_HEAD_BYTES, SEGMENT_HEAD_BYTES
from outbox_core.journal.checkpoint_parts import checkpoint_part
from outbox_core.messages.message import GroupConfig
from spark_reconcile import NotComparable
from spark_reconcile.load.lost_log_ends import LogEnd, log_end, torn_tail
from spark_reconcile.load.name_checks import known_groups
from spark_reconcile.sources.broker_logs import RUN_SCHEMA, LogSegment, action_rows, grown, survey
from spark_reconcile.sources.log_source import LogReader
from tests.outbox_broker.action_log import (
    append_actions,
    append_blocks,
    blocks_in,
    damage_action,
    damage_checkpoints,
    stored_actions,
    whole_checkpoint,
    write_actions,
)
from tests.spark_reconcile.world import NOW_MS

COLUMNS = [column.split()[0] for column in RUN_SCHEMA.split(", ")]
AT_MS = NOW_MS - 60_000


def acked(number: int) -> journal.Settled:
    return journal.Settled(topic="t", group="g", at_ms=AT_MS + number, runs=[(number, 1)])


def rows_of(segments: Sequence[LogSegment]) -> list[dict[str, Any]]:
    return list(_rows(segments))


def _rows(segments: Sequence[LogSegment]) -> Iterator[dict[str, Any]]:
    reader = LogReader(list(segments), rows_of=action_rows, columns=COLUMNS)
    for part in reader.partitions():
        with closing(reader.read(part)) as batches:  # type: ignore[arg-type]
            for batch in batches:
                yield from batch.to_pylist()


def sequences(segments: Sequence[LogSegment]) -> list[int]:
    return [row["sequence"] for row in rows_of(segments)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Nine actions in three segments, three blocks each."""
    return write_actions(tmp_path / "actions", [acked(number) for number in range(9)], 3, created_at_ms=AT_MS)


@pytest.mark.parametrize("segment_number", [1, 2], ids=["sealed", "last"])
def test_a_flipped_bit_in_any_byte_of_a_block_loses_no_action(
    tmp_path: Path, paths: list[Path], segment_number: int
) -> None:
    good, path = rows_of(survey(tmp_path, "actions")), paths[segment_number]
    whole = path.read_bytes()

    for position in range(SEGMENT_HEAD_BYTES, len(whole)):
        flipped = bytes([whole[position] ^ 1 << position % 8])
        path.write_bytes(whole[:position] + flipped + whole[position + 1 :])
        assert rows_of(survey(tmp_path, "actions")) == good, f"byte {position}"


@pytest.mark.parametrize("segment_number", [0, 2], ids=["sealed", "last"])
@pytest.mark.parametrize("block_number", [0, 1, 2])
def test_an_action_of_which_both_copies_are_damaged_is_told_with_its_place(
    tmp_path: Path, paths: list[Path], segment_number: int, block_number: int
) -> None:
    path = paths[segment_number]
    stored = stored_actions(path)[block_number]
    offset = survey(tmp_path, "actions")[segment_number].first_offset + stored.begin - SEGMENT_HEAD_BYTES
    damage_action(path, stored)

    damage = [row["damage"] for row in rows_of(survey(tmp_path, "actions")) if row["damage"]]

    assert damage == [f"{path}: damaged block at offset {offset}"]


def test_every_flip_of_a_segments_head_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    whole = paths[1].read_bytes()

    for position in range(SEGMENT_HEAD_BYTES):
        paths[1].write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(NotComparable, match=f"{paths[1]} cannot be read"):
            survey(tmp_path, "actions")


def test_a_segment_ends_where_the_next_one_begins(tmp_path: Path, paths: list[Path]) -> None:
    good, whole = rows_of(survey(tmp_path, "actions")), paths[1].read_bytes()
    append_actions(paths[1], [acked(99)])  # of an append that failed, before the next segment was begun

    assert rows_of(survey(tmp_path, "actions")) == good

    paths[1].write_bytes(whole[:-1])
    with pytest.raises(NotComparable, match=f"hole between {paths[1]} and {paths[2]}.*lost power, start the broker"):
        survey(tmp_path, "actions")
    paths[1].unlink()
    append_actions(paths[0], [acked(number) for number in range(20)])
    with pytest.raises(NotComparable, match="restore the missing segment"):
        survey(tmp_path, "actions")


def test_a_newest_segment_that_only_its_note_tells_of_is_missing(tmp_path: Path, paths: list[Path]) -> None:
    for path in paths:
        path.with_suffix(".proven").write_text("0 boot\n")
    survey(tmp_path, "actions")

    paths[-1].unlink()

    with pytest.raises(
        NotComparable, match=f"{paths[-1].stem} is missing .*the newest segment.*restore it from a copy"
    ):
        survey(tmp_path, "actions")


@pytest.mark.parametrize("made", [b"", b"OMQSEGM1" + bytes(9), bytes(4096)], ids=["empty", "half a head", "zeros"])
def test_a_segment_that_is_being_made_is_not_there_yet(tmp_path: Path, paths: list[Path], made: bytes) -> None:
    before = survey(tmp_path, "actions")

    paths[-1].with_name("actions-000000000004.segment").write_bytes(made)

    assert survey(tmp_path, "actions") == before


def test_the_first_segment_that_is_being_made_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "actions").mkdir()
    (tmp_path / "actions" / "actions-000000000001.segment").write_bytes(b"")

    segments = survey(tmp_path, "actions")

    assert (rows_of(segments), log_end(segments)) == ([], LogEnd())


def test_segments_of_the_earlier_format_are_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "actions").mkdir()
    (tmp_path / "actions" / f"{0:020d}.log").write_bytes(b"OUTBOXMQ")

    with pytest.raises(ConfigurationError, match=r"earlier format .*with the version that wrote it"):
        survey(tmp_path, "actions")


def test_each_action_has_a_position_of_its_own_and_they_grow(tmp_path: Path) -> None:
    [path] = write_actions(tmp_path / "actions", [acked(0)], 9, created_at_ms=AT_MS)
    append_actions(path, [acked(number) for number in range(1, 5)], together=True)
    append_actions(path, [acked(5)])
    begins = [block.position - SEGMENT_HEAD_BYTES for block in blocks_in(path)]

    rows = rows_of(survey(tmp_path, "actions"))

    assert [row["sequence"] for row in rows] == list(range(6))
    assert [row["position"] for row in rows] == [begins[0], *(begins[1] + number for number in range(4)), begins[2]]
    assert begins[2] > begins[1] + 4


def test_what_was_read_before_is_passed_over_and_a_block_that_was_half_written_then_is_not(
    tmp_path: Path, paths: list[Path]
) -> None:
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole[:-1])
    before = survey(tmp_path, "actions")
    paths[-1].write_bytes(whole)
    append_actions(paths[-1], [acked(9)])

    now = survey(tmp_path, "actions")

    assert sequences(before) == list(range(8))
    assert sequences(grown(before, now)) == [8, 9]
    assert grown(now, now) == []


def test_what_a_restarted_broker_writes_in_place_of_a_torn_tail_was_not_read_before(
    tmp_path: Path, paths: list[Path]
) -> None:
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole + b"torn" * 500)
    before = survey(tmp_path, "actions")
    end = log_end(before).offset
    paths[-1].write_bytes(whole)
    append_actions(paths[-1], [acked(9)])

    now = survey(tmp_path, "actions")

    assert now[-1].size_bytes < before[-1].size_bytes
    assert sequences(grown(before, now, end_offset=end)) == [9]
    assert grown(now, now, end_offset=log_end(now).offset) == []


def test_the_end_of_the_log_is_that_of_its_last_block(tmp_path: Path, paths: list[Path]) -> None:
    segments = survey(tmp_path, "actions")
    first = segments[-1].first_offset
    ends = [first + block.end - SEGMENT_HEAD_BYTES for block in blocks_in(paths[-1])]

    assert log_end(segments, settled_ms=AT_MS + 7) == LogEnd(
        offset=ends[-1], last_ms=AT_MS + 8, settled_offset=ends[1]
    )  # fmt: skip
    assert log_end(segments, settled_ms=AT_MS).settled_offset == first


def test_a_torn_block_is_named_and_one_that_was_being_written_and_zeros_are_not(
    tmp_path: Path, paths: list[Path]
) -> None:
    path, whole = paths[-1], paths[-1].read_bytes()
    *_, last = blocks_in(path)

    told = set()
    for kept in range(last.position + 1, len(whole)):
        path.write_bytes(whole[:kept])
        segments = survey(tmp_path, "actions")
        assert sequences(segments) == list(range(8))
        assert torn_tail(segments) == f"torn tail of {kept - last.position} bytes at {path}: read up to it"
        path.write_bytes(whole)
        told.add(torn_tail(segments))
    path.write_bytes(whole + bytes(4096))

    assert told == {""}
    assert torn_tail(survey(tmp_path, "actions")) == ""


def test_a_block_of_a_newer_version_or_kind_is_refused_rather_than_passed_over(
    tmp_path: Path, paths: list[Path]
) -> None:
    *_, last = blocks_in(paths[-1])
    whole, told = paths[-1].read_bytes(), []
    for at, value in ((4, 0xBB), (5, 2)):  # the kind, and the version
        head = bytearray(whole[last.position : last.position + BLOCK_HEAD_BYTES - 4])
        head[at] = value
        checked = bytes(head) + struct.pack("<I", google_crc32c.value(bytes(head)))
        paths[-1].write_bytes(whole[: last.position] + checked + whole[last.position + BLOCK_HEAD_BYTES :])
        told += [row["damage"] for row in rows_of(survey(tmp_path, "actions")) if row["damage"]]

    assert ["unknown kind 0xbb" in told[0], "upgrade" in told[1], len(told)] == [True, True, 2]


def test_groups_are_known_by_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    clock = ManualClock(AT_MS)
    options = EngineOptions(checkpoint_bytes=4096, retention_ms=1000)
    with closing(Engine.open(tmp_path, clock=clock, options=options)) as engine:
        engine.admin.declare_group("t", "idle", GroupConfig())
        for _ in range(300):
            engine.admin.declare_group("t", "busy", GroupConfig())
            clock.advance(100)
        engine.writer.write_checkpoint()
        engine.writer.write_checkpoint()
        engine.retention.drop_outdated()
    assert survey(tmp_path, "actions")[0].first_offset > 0
    read: list[int] = []

    while (captured := whole_checkpoint(tmp_path)) is not None:
        assert groups_of(tmp_path) == {("t", "idle"), ("t", "busy")}
        damage_checkpoints(tmp_path, captured=captured)
        read.append(captured)
    assert groups_of(tmp_path) is None
    assert len(read) > 1


def test_a_checkpoint_whose_parts_are_in_several_segments_is_whole(tmp_path: Path) -> None:
    first, *_, last = write_actions(
        tmp_path / "actions", [acked(0), acked(1)], 1, created_at_ms=AT_MS, first_offset=64, first_number=2
    )
    state = msgspec.msgpack.encode([0, 1, {}, [["t", "idle"], ["t", "busy"]]])
    first.write_bytes(first.read_bytes()[:SEGMENT_HEAD_BYTES])
    append_blocks(first, [(checkpoint_part(state[:9], captured=64, number=0, is_last=False), AT_MS)])
    [part] = blocks_in(first)
    write_actions(tmp_path / "rest", [], 1, created_at_ms=AT_MS, first_offset=64 + part.end - SEGMENT_HEAD_BYTES)
    (tmp_path / "rest" / "actions-000000000001.segment").replace(last)

    assert groups_of(tmp_path) is None
    append_blocks(last, [(checkpoint_part(state[9:], captured=64, number=1, is_last=True), AT_MS)])

    assert groups_of(tmp_path) == {("t", "idle"), ("t", "busy")}


def groups_of(folder: Path) -> frozenset[tuple[str, str]] | None:
    """The groups of a log whose beginning was dropped; None if they are not known."""
    known = known_groups([], [], survey(folder, "actions"))
    return known.pairs if known.is_complete else None


def test_a_survey_goes_to_sparks_workers_as_json(tmp_path: Path, paths: list[Path]) -> None:
    segments = survey(tmp_path, "actions")

    assert msgspec.json.decode(msgspec.json.encode(segments), type=list[LogSegment]) == segments
    assert len(segments) == len(paths)
