"""Frames on the broker's disk: what was written is read, a torn tail ends the log, damage in the middle is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.journal.journal import (
    FRAME_BYTES,
    HEADER_BYTES,
    RECORD_BYTES_MAX,
    Canceled,
    Declared,
    Died,
    Extended,
    Fired,
    Handed,
    HandedRun,
    MessageRecord,
    Paused,
    Redriven,
    Requeued,
    SegmentDamaged,
    SegmentHeader,
    SegmentKind,
    Settled,
    Sought,
    decode_action,
    decode_message,
    encode_record,
    frame,
    read_frames,
    read_segment,
    segment_path,
    segment_paths,
)

payloads = st.lists(st.binary(min_size=1, max_size=60), max_size=8)
PAYLOADS = [b"\x91first", b"\x91" + b"\x01" * 8, b"\x91third one", b"\x91x"]  # records are arrays
WHOLE = b"".join(frame(payload) for payload in PAYLOADS)

COPIED = frame(b"\x91\x01") + frame(b"\x92\x02\x03")
COPY = encode_record(
    MessageRecord(
        sequence=0, id="copy", topic="backups", key=None, headers={}, body=COPIED, created_at_ms=1, stored_at_ms=1
    )
)
"""A message that carries a piece of a log."""


def read(data: bytes, first_offset: int = 0) -> list[bytes]:
    """The payloads of a segment's body."""
    return [one.payload for one in read_frames(data, first_offset=first_offset)]


@given(payloads, st.integers(0, 2**60))
def test_what_was_framed_is_read_with_its_offsets(written: list[bytes], first_offset: int) -> None:
    data = b"".join(frame(payload) for payload in written)

    found = list(read_frames(data, first_offset=first_offset))

    assert [one.payload for one in found] == written
    ends = [one.end for one in found]
    assert [one.offset for one in found] == [first_offset, *ends][: len(found)]
    assert not ends or ends[-1] == first_offset + len(data)


@pytest.mark.parametrize("kept", range(len(WHOLE) + 1))
def test_a_log_torn_at_any_byte_ends_behind_its_last_whole_frame(kept: int) -> None:
    ends, end = [], 0
    for payload in PAYLOADS:
        end += FRAME_BYTES + len(payload)
        ends.append(end)
    whole_frames = sum(1 for end in ends if end <= kept)

    assert read(WHOLE[:kept]) == PAYLOADS[:whole_frames]
    assert read(WHOLE[:kept] + bytes(100)) == PAYLOADS[:whole_frames], "zeroes behind a torn tail are its tail"


@pytest.mark.parametrize("bit", range(8 * (len(WHOLE) - len(frame(PAYLOADS[-1])))))
def test_a_flipped_bit_before_a_whole_frame_is_damage(bit: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[bit // 8] ^= 1 << bit % 8

    with pytest.raises(SegmentDamaged, match="at offset"):
        read(bytes(damaged))


@pytest.mark.parametrize("bit", range(8 * len(frame(PAYLOADS[-1]))))
def test_a_flipped_bit_in_the_last_frame_is_a_torn_tail(bit: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[len(WHOLE) - len(frame(PAYLOADS[-1])) + bit // 8] ^= 1 << bit % 8

    assert read(bytes(damaged)) == PAYLOADS[:-1]


@pytest.mark.parametrize("kept", range(1, len(COPY)))
def test_frames_within_a_record_that_was_cut_short_are_no_frames_of_the_log(kept: int) -> None:
    assert read(WHOLE + frame(COPY)[:-kept]) == PAYLOADS


@pytest.mark.parametrize("at", range(len(COPIED)))
def test_frames_within_a_damaged_record_do_not_follow_it(at: int) -> None:
    damaged = bytearray(frame(COPY))
    damaged[damaged.index(COPIED) + at] ^= 1

    assert read(WHOLE + damaged) == PAYLOADS, "the last one is a torn tail"


def test_an_endless_length_is_no_record_and_nothing_is_allocated_for_it() -> None:
    length = (RECORD_BYTES_MAX + 1).to_bytes(4, "little")

    assert read(length + bytes(200)) == []


@given(st.sampled_from(SegmentKind), st.integers(0, 2**63), st.integers(0, 2**63))
def test_a_header_is_read_as_it_was_written(kind: SegmentKind, first_offset: int, created_at_ms: int) -> None:
    header = SegmentHeader(kind=kind, first_offset=first_offset, created_at_ms=created_at_ms)

    data = header.encode()

    assert len(data) == HEADER_BYTES
    assert SegmentHeader.decode(data) == header


@pytest.mark.parametrize("bit", range(8 * HEADER_BYTES))
def test_a_flipped_bit_in_the_header_is_damage(bit: int) -> None:
    data = bytearray(SegmentHeader(kind=SegmentKind.ACTIONS, first_offset=7, created_at_ms=8).encode())
    data[bit // 8] ^= 1 << bit % 8

    with pytest.raises(SegmentDamaged):
        SegmentHeader.decode(bytes(data))


@pytest.mark.parametrize("kept", range(HEADER_BYTES))
def test_a_header_cut_short_is_damage(kept: int) -> None:
    data = SegmentHeader(kind=SegmentKind.MESSAGES, first_offset=0, created_at_ms=0).encode()

    with pytest.raises(SegmentDamaged, match="shorter"):
        SegmentHeader.decode(data[:kept])


def test_segments_are_found_in_order_of_their_offsets_and_other_files_are_not(tmp_path: Path) -> None:
    for offset in (10**12, 0, 500):
        header = SegmentHeader(kind=SegmentKind.MESSAGES, first_offset=offset, created_at_ms=1)
        segment_path(tmp_path, offset).write_bytes(header.encode() + frame(str(offset).encode()))
    for name in ("lock", "5.log", "00000000000000000007.log.new", "0000000000000000000x.log"):
        (tmp_path / name).touch()

    paths = segment_paths(tmp_path)

    assert [int(path.stem) for path in paths] == [0, 500, 10**12]
    header, frames = read_segment(paths[1])
    assert header.first_offset == 500
    assert [(one.offset, one.payload) for one in frames] == [(500, b"500")]


RECORDS = [
    Fired(topic="t", at_ms=1, entries=[(0, "m")]),
    Canceled(at_ms=1, ids=["m"], topics=[""]),
    Declared(topic="t", group="g", at_ms=1, position=0, settings={"ordered": True, "filter": None, "x": 1.5}),
    Handed(topic="t", group="g", at_ms=1, visible_at_ms=2, runs=[HandedRun(0, 500, 1, 1), HandedRun(509, 1, 2, 1)]),
    Settled(topic="t", group="g", at_ms=1, runs=[(0, 500), (509, 1)]),
    Requeued(topic="t", group="g", at_ms=1, entries=[(0, 500, 5, 1)]),
    Died(topic="t", group="g", at_ms=1, entries=[(0, 500, 16)], reason="why"),
    Requeued(topic="t", group="g", at_ms=1, entries=[(0, 1, 5, 1)], reason="why"),
    Extended(topic="t", group="g", at_ms=1, visible_at_ms=2, entries=[(0, 1)]),
    Redriven(topic="t", group="g", at_ms=1, entries=[(0, 1)]),
    Sought(topic="t", group="g", at_ms=1, position=0, generation=1),
    Paused(topic="t", group="g", at_ms=1, paused=True),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_action_is_read_as_it_was_written(record: object) -> None:
    assert decode_action(encode_record(record)) == record


@given(st.binary(max_size=200), st.none() | st.text(st.characters(codec="utf-8")), st.none() | st.integers(0, 2**53))
def test_every_message_is_read_as_it_was_written(body: bytes, key: str | None, deliver_at_ms: int | None) -> None:
    record = MessageRecord(
        sequence=None, id="m", topic="t", key=key, headers={"a": "ä"}, body=body, created_at_ms=1, stored_at_ms=2,
        deliver_at_ms=deliver_at_ms,
    )  # fmt: skip

    assert decode_message(encode_record(record)) == record


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_fail_otherwise_than_by_saying_damage(data: bytes) -> None:
    damage = ""
    try:
        read(data)
    except SegmentDamaged as error:
        damage = str(error)

    assert damage == "" or "at offset" in damage
