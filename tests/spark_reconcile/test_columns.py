"""Message records read by the column are what they are one by one, whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.journal import journal
from outbox_core.journal.frame_scan import payload_bounds
from spark_reconcile.sources.arrow_decoding import WIDEST_BYTES, UnusualEncoding, message_columns
from spark_reconcile.sources.broker_logs import HEADER_SCHEMA, MESSAGE_SCHEMA, header_rows, message_rows, survey
from spark_reconcile.sources.log_source import LogReader, PushingLogReader
from tests.spark_reconcile.world import write_log

NAMES = [column.split()[0] for column in MESSAGE_SCHEMA.split(", ")]
TIMES = st.one_of(st.integers(0, 200), st.integers(0, 1 << 48), st.just((1 << 63) - 1))
TEXTS = st.text(max_size=40) | st.just("x" * 300) | st.just("\N{SNOWMAN}" * 12)
MESSAGES = st.builds(
    journal.MessageRecord,
    sequence=st.none() | TIMES,
    id=TEXTS,
    topic=TEXTS,
    key=st.none() | TEXTS,
    headers=st.dictionaries(TEXTS, TEXTS, max_size=5),
    body=st.binary(max_size=40) | st.just(b"y" * 70_000),
    created_at_ms=TIMES,
    stored_at_ms=TIMES,
    deliver_at_ms=st.none() | TIMES,
    copy=st.sampled_from([journal.PUBLISHED, journal.FIRED_COPY, journal.DEAD_ON_ARRIVAL]),
)
NOTES = st.builds(
    msgspec.structs.replace,
    MESSAGES,
    sequence=st.none(),
    headers=st.just({}),
    body=st.binary(min_size=32, max_size=32),
    copy=st.just(journal.SCHEDULED),
)
RECORDS = MESSAGES | NOTES


@given(st.lists(RECORDS, min_size=1, max_size=12))
def test_columns_are_the_rows(records: list[journal.MessageRecord]) -> None:
    data, _ = journal.frames([journal.encode_record(one) for one in records])

    columns = _columns(data)

    rows = [row for frame in journal.read_frames(data, first_offset=0) for row in message_rows(frame)]
    assert [tuple(row.values()) for row in columns.to_pylist()] == rows
    columns.validate(full=True)


@given(st.lists(RECORDS, min_size=1, max_size=12))
def test_headers_are_those_of_the_records(records: list[journal.MessageRecord]) -> None:
    data, _ = journal.frames([journal.encode_record(one) for one in records])
    names = [column.split()[0] for column in HEADER_SCHEMA.split(", ")]

    columns = _columns(data, names)

    rows = [row for frame in journal.read_frames(data, first_offset=0) for row in header_rows(frame)]
    assert [tuple(row.values()) for row in columns.to_pylist()] == rows
    packed = columns.column("headers").to_pylist()
    assert [msgspec.msgpack.decode(one) for one in packed] == [one.headers for one in records]


@pytest.mark.parametrize(
    "written",
    [
        [1, "id", "topic", None, {}, b"", 5, 6],
        [1, "id", "topic", None, {}, b"", 5, 6, None, 0, "of a later version"],
        [1, "id", "topic", None, {str(one): "x" for one in range(20)}, b"", 5, 6, None, 0],
        [None, "id", "topic", None, {}, b"no hash", 5, 6, 9, journal.SCHEDULED],
    ],
    ids=["shorter", "longer", "many headers", "a note of another hash"],
)
def test_a_record_of_another_shape_is_read_by_itself(written: list[Any], tmp_path: Path) -> None:
    plain = journal.MessageRecord(
        sequence=0, id="plain", topic="topic", key="k", headers={}, body=b"b", created_at_ms=5, stored_at_ms=6
    )
    write_log(tmp_path / "messages", journal.SegmentKind.MESSAGES, [plain, written, plain], 10)

    with pytest.raises(UnusualEncoding):
        _columns(journal.frame(msgspec.msgpack.encode(written)))
    assert [row["id"] for row in _read(tmp_path)] == ["plain", "id", "plain"]


def test_what_is_no_record_is_named_as_damage(tmp_path: Path) -> None:
    write_log(tmp_path / "messages", journal.SegmentKind.MESSAGES, [[1, "id", "topic", None, {}, b"", "noon", 6]], 10)

    (row,) = _read(tmp_path)

    assert row["id"] is None
    assert "Expected `int`" in row["damage"]


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    records = [
        journal.MessageRecord(
            sequence=number,
            id=f"m-{number}",
            topic="t",
            key=None,
            headers={},
            body=b"",
            created_at_ms=5,
            stored_at_ms=6,
        )
        for number in range(6)
    ]
    write_log(tmp_path / "messages", journal.SegmentKind.MESSAGES, records[:4], 10)
    (before,) = survey(tmp_path, "messages")
    write_log(tmp_path / "messages", journal.SegmentKind.MESSAGES, records, 10)
    (now,) = survey(tmp_path, "messages")

    rows = _rows(LogReader, [msgspec.structs.replace(now, known_bytes=before.size_bytes)], NAMES)

    assert [row["id"] for row in rows] == ["m-4", "m-5"]


def test_columns_that_are_not_wanted_are_not_made(tmp_path: Path) -> None:
    record = journal.MessageRecord(
        sequence=0, id="a", topic="t", key=None, headers={}, body=b"", created_at_ms=5, stored_at_ms=6
    )
    write_log(tmp_path / "messages", journal.SegmentKind.MESSAGES, [record, [0, "b", "t", None, {}, b"", 5, 6]], 10)

    rows = _rows(PushingLogReader, survey(tmp_path, "messages"), ["id", "stored_ms", "damage"])

    assert rows == [{"id": one, "stored_ms": 6, "damage": None} for one in ("a", "b")]


def _columns(data: bytes, names: list[str] = NAMES) -> pa.RecordBatch:
    begins, behind = payload_bounds(data, start=0, frames_max=1000)
    assert behind == len(data)
    starts = np.array(begins, np.int64)
    ends = np.append(starts[1:] - journal.FRAME_BYTES, behind)
    return message_columns(data + bytes(WIDEST_BYTES), starts, ends, names)


def _read(folder: Path) -> list[dict[str, Any]]:
    return _rows(LogReader, survey(folder, "messages"), NAMES)


def _rows(reader: type[LogReader], segments: list[Any], columns: list[str]) -> list[dict[str, Any]]:
    found = reader(segments, rows_of=message_rows, columns=columns)
    return [row for part in found.partitions() for batch in found.read(part) for row in batch.to_pylist()]
