"""Message records read by the column are what they are one by one, whatever is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.block import BLOCK_HEAD_BYTES, SEGMENT_HEAD_BYTES, FrameKind, block, framed, payloads_in, scan
from spark_reconcile.load.lost_log_ends import LogEnd, log_end
from spark_reconcile.sources.arrow_decoding import UnusualEncoding, message_columns
from spark_reconcile.sources.broker_logs import (
    HEADER_SCHEMA,
    MESSAGE_KINDS,
    MESSAGE_SCHEMA,
    LoggedFrame,
    Row,
    begins_whole,
    grown,
    header_rows,
    message_rows,
    survey,
)
from spark_reconcile.sources.log_source import LogReader, PushingLogReader
from tests.outbox_broker.action_log import append_blocks, blocks_in
from tests.spark_reconcile.message_log import LoggedMessage, append_messages, framed_messages
from tests.spark_reconcile.world import write_log

NAMES = [column.split()[0] for column in MESSAGE_SCHEMA.split(", ")]
TIMES = st.one_of(st.integers(0, 200), st.integers(0, 1 << 48), st.just((1 << 63) - 1))
TEXTS = st.text(max_size=40) | st.just("x" * 300) | st.just("\N{SNOWMAN}" * 12)
MESSAGES = st.builds(
    LoggedMessage,
    sequence=st.integers(0, 200) | st.integers(0, (1 << 55) - 1),
    id=TEXTS,
    topic=TEXTS,
    key=st.none() | TEXTS,
    headers=st.dictionaries(TEXTS, TEXTS, max_size=5),
    body=st.binary(max_size=40) | st.just(b"y" * 70_000),
    created_at_ms=TIMES,
    stored_at_ms=TIMES,
    deliver_at_ms=st.none() | TIMES,
    kind=st.sampled_from([FrameKind.MESSAGE, FrameKind.DISPATCHED]),
)
ON_ARRIVAL = st.builds(replace, MESSAGES, sequence=st.none(), kind=st.just(FrameKind.CANCELED))
SCHEDULED = st.builds(replace, MESSAGES, sequence=st.none(), kind=st.just(FrameKind.SCHEDULED))
BLOCKS = st.lists(st.lists(MESSAGES | ON_ARRIVAL | SCHEDULED, min_size=1, max_size=6), min_size=1, max_size=4)
"""Messages of any kinds, in the blocks in which they are written."""


@given(BLOCKS)
def test_columns_are_the_rows(blocks: list[list[LoggedMessage]]) -> None:
    data = _blocks(blocks)

    columns = _columns(data)

    assert [tuple(row.values()) for row in columns.to_pylist()] == _one_by_one(data, message_rows)
    columns.validate(full=True)


@given(BLOCKS)
def test_headers_are_those_of_the_records(blocks: list[list[LoggedMessage]]) -> None:
    data = _blocks(blocks)
    names = [column.split()[0] for column in HEADER_SCHEMA.split(", ")]

    columns = _columns(data, names)

    assert [tuple(row.values()) for row in columns.to_pylist()] == _one_by_one(data, header_rows)
    packed = columns.column("headers").to_pylist()
    assert [msgspec.msgpack.decode(one) for one in packed] == [one.headers for some in blocks for one in some]


@pytest.mark.parametrize(
    "written",
    [
        ["id", "topic", None, {}, b"", 5],
        ["id", "topic", None, {}, b"", 5, None, "of a later version"],
        ["id", "topic", None, {str(one): "x" for one in range(20)}, b"", 5, None],
    ],
    ids=["shorter", "longer", "many headers"],
)
def test_a_record_of_another_shape_is_read_by_itself(written: object, tmp_path: Path) -> None:
    plain = LoggedMessage(
        sequence=0, id="plain", topic="topic", key="k", headers={}, body=b"b", created_at_ms=5, stored_at_ms=6
    )
    write_log(tmp_path / "messages", [plain, written, plain], 10)

    with pytest.raises(UnusualEncoding):
        _columns(_blocks([[written]]))
    assert [row["id"] for row in _read(tmp_path)] == ["plain", "id", "plain"]


def test_what_is_no_record_is_named_as_damage(tmp_path: Path) -> None:
    write_log(tmp_path / "messages", [["id", "topic", None, {}, b"", "noon"]], 10)

    (row,) = _read(tmp_path)

    assert row["id"] is None
    assert "Expected `int`" in row["damage"]


def test_a_log_that_the_broker_has_not_begun_is_empty_and_its_first_message_is_read_later(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{tmp_path} is not a broker's data folder: it has no folder messages"
    ):
        survey(tmp_path, "messages")
    (tmp_path / "messages").mkdir()

    before = survey(tmp_path, "messages")
    append_messages(write_log(tmp_path / "messages", [_record(0)], 1)[0], [_record(1)])
    now = survey(tmp_path, "messages")

    assert (_rows(LogReader, before, NAMES), log_end(before), begins_whole(before)) == ([], LogEnd(), True)
    assert [row["id"] for row in _rows(LogReader, grown(before, now, end_offset=0), NAMES)] == ["m-0", "m-1"]


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    records = [_record(number) for number in range(9)]
    [path] = write_log(tmp_path / "messages", records[:2], 10)
    append_messages(path, records[2:6], together=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])  # the block was being written
    torn = survey(tmp_path, "messages")
    path.write_bytes(whole)
    before = survey(tmp_path, "messages")
    append_messages(path, records[6:], together=True)
    now = survey(tmp_path, "messages")

    assert [row["id"] for row in _rows(LogReader, torn, NAMES)] == ["m-0", "m-1"]
    assert [row["id"] for row in _rows(LogReader, grown(torn, now), NAMES)] == [f"m-{number}" for number in range(2, 9)]
    assert [row["id"] for row in _rows(LogReader, grown(before, now), NAMES)] == ["m-6", "m-7", "m-8"]


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "last"])
def test_a_flipped_bit_is_told_as_damage_with_its_place_and_loses_nothing_in_the_head_of_a_block(
    tmp_path: Path, is_sealed: bool
) -> None:
    records = [_record(number) for number in range(7)]
    [path] = write_log(tmp_path / "messages", records[:1], 1)
    append_messages(path, records[1:4], together=True)
    append_messages(path, records[4:5])
    behind = records[5:] if is_sealed else []
    if is_sealed:
        first_offset = path.stat().st_size - SEGMENT_HEAD_BYTES
        [following] = write_log(tmp_path / "rest" / "messages", behind, 9, first_offset=first_offset)
        following.replace(path.with_name(following.name))
    whole, blocks = path.read_bytes(), list(blocks_in(path))
    ids = [row["id"] for row in _read(tmp_path)]

    for position in range(SEGMENT_HEAD_BYTES, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
        [hit] = [found for found in blocks if found.position <= position < found.end]
        before = sum(len(found.frames) for found in blocks if found.position < hit.position)
        damage = f"{path}: damaged block at offset {hit.position - SEGMENT_HEAD_BYTES}"
        told = [row["damage"] or row["id"] for row in _read(tmp_path)]
        if position < hit.position + BLOCK_HEAD_BYTES:
            assert told == ids, f"byte {position}"
        else:
            assert told == [*ids[:before], damage, *(one.id for one in behind)], f"byte {position}"


def test_what_is_in_a_block_without_a_head_was_stored_when_it_was_created(tmp_path: Path) -> None:
    [path] = write_log(tmp_path / "messages", [_record(0)], 1)
    append_messages(path, [replace(_record(number), stored_at_ms=10 * number) for number in (1, 2)])
    whole, blocks = path.read_bytes(), list(blocks_in(path))

    for hit, times in enumerate([[5, 10, 20], [6, 5, 20], [6, 10, 5]]):
        data = bytearray(whole)
        data[blocks[hit].position + 4] ^= 1
        path.write_bytes(data)
        assert [row["stored_ms"] for row in _read(tmp_path)] == times
        [settled] = survey(tmp_path, "messages")
        last = 20 if hit < 2 else 10
        assert log_end([settled], settled_ms=15).last_ms == last


def test_a_footer_that_lost_its_head_and_its_first_frame_costs_the_proof_nothing(tmp_path: Path) -> None:
    [path] = write_log(tmp_path / "messages", [_record(0)], 1)
    footer = framed(FrameKind.FOOTER, range(1), [b"directory"])
    footer.extend(framed(FrameKind.FOOTER, range(1), [b"runs"]))
    append_blocks(path, [(footer, 7)])
    append_messages(path, [_record(1)])
    [found] = [block for block in blocks_in(path) if block.kind == FrameKind.FOOTER]
    data = bytearray(path.read_bytes())
    data[found.position : found.starts[1]] = bytes(found.starts[1] - found.position)
    path.write_bytes(data)

    assert [row["damage"] or row["id"] for row in _read(tmp_path)] == ["m-0", "m-1"]


def test_columns_that_are_not_wanted_are_not_made(tmp_path: Path) -> None:
    record = _record(0)
    write_log(tmp_path / "messages", [record, ["b", "t", None, {}, b"", 5]], 10)

    rows = _rows(PushingLogReader, survey(tmp_path, "messages"), ["id", "stored_ms", "damage"])

    assert rows == [{"id": one, "stored_ms": 6, "damage": None} for one in ("m-0", "b")]


def _record(number: int) -> LoggedMessage:
    return LoggedMessage(
        sequence=number, id=f"m-{number}", topic="t", key=None, headers={}, body=b"", created_at_ms=5, stored_at_ms=6
    )  # fmt: skip


def _blocks(blocks: Sequence[Sequence[object]]) -> bytes:
    """The bytes of a log that begins with these blocks."""
    data, frames_before = b"", 0
    for number, messages in enumerate(blocks):
        frames = framed_messages(messages)
        # The first one as of an export, which does not know when.
        data += block(frames, offset=len(data), durable=0, at_ms=6 * number, frames_before=frames_before)
        frames_before = len(frames)
    return data


def _columns(data: bytes, names: list[str] = NAMES) -> pa.RecordBatch:
    found = payloads_in(data, 0, first=0, wanted=MESSAGE_KINDS, frames_max=1000)
    assert found.end == len(data)
    return message_columns(data, found, names)


def _one_by_one(data: bytes, rows_of: Callable[[LoggedFrame], Iterator[Row]]) -> list[Row]:
    return [
        row
        for found in scan(data, first=0, proven=len(data), same_boot=True)
        for frame in found.frames
        for row in rows_of(LoggedFrame(*frame, stored_ms=found.at_ms or 0, position=0))
    ]


def _read(folder: Path) -> list[dict[str, Any]]:
    return _rows(LogReader, survey(folder, "messages"), NAMES)


def _rows(reader: type[LogReader], segments: list[Any], columns: list[str]) -> list[dict[str, Any]]:
    found = reader(segments, rows_of=message_rows, columns=columns)
    return [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]
