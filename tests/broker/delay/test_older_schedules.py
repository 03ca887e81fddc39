"""A schedule that version 1 wrote is opened and gone on with, in whatever form it says a thing.

`version-1.tar.xz` was written by that code: w00 to w39 in a week's bucket, of which w07 is canceled; f0 to f2, of which
two fired while they were flushed; b0 to b7, of which four are out; p0, which fired once and comes again,
and p1, which is out of memory; q0 to q3 in memory, of which q1 is canceled; and `early`, canceled before it came.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from broker.delay import records
from broker.delay.run import Entry, Stored, decode_messages
from broker.delay.store import DelayStore
from tests.broker.delay.conftest import DAY_MS, NOW_MS, Opened, drain, flush, put, settle, timed
from tests.broker.older_folder import unpack

OUT = [["b0", "b1", "b2", "b3"], ["p1"]]
IN_MEMORY = ["q0", "q2", "q3", "p0"]
WEEKS = [f"w{number:02d}" for number in range(40) if number != 7]


@pytest.fixture
def opened(tmp_path: Path, opened: Opened) -> Opened:
    """What version 1 left."""
    opened.folder = unpack(Path(__file__).parent / "version-1.tar.xz", tmp_path)
    return opened


def of_topics(schedule: DelayStore, now_ms: int) -> list[str]:
    """Everything due, settled, with its topic checked."""
    ids: list[str] = []
    while (batch := schedule.due(now_ms)) is not None:
        for one in batch.messages:
            topic = "u" if one.id[0] == "w" and int(one.id[1:]) % 3 == 0 else "t"
            assert one == timed(one.id, one.due_ms, topic=topic)
        ids += [one.id for one in batch.messages]
        schedule.fired(batch.number)
    return ids


@pytest.mark.parametrize("is_restarted", [False, True], ids=["at once", "flushed, refiled and restarted"])
def test_a_schedule_of_version_1_is_delivered_to_the_last_message(opened: Opened, *, is_restarted: bool) -> None:
    schedule = opened.open()
    if is_restarted:
        flush(schedule, NOW_MS + 20 * DAY_MS)
        settle(schedule, NOW_MS + 26 * DAY_MS)
        schedule = opened.open()

    assert schedule.topics() == {"t": 34, "u": 14}
    assert [[one.id for one in batch.messages] for batch in schedule.unsettled()] == OUT
    assert drain(schedule, NOW_MS + 1_002) == ["b4", "b5", "b6", "b7", "f2"]
    assert of_topics(schedule, NOW_MS + 29 * DAY_MS) == IN_MEMORY
    assert of_topics(schedule, NOW_MS + 40 * DAY_MS) == WEEKS
    assert schedule.count() == 0


def test_runs_of_both_versions_stand_in_one_bucket(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("w99", NOW_MS + 30 * DAY_MS + 99, topic="u"))
    flush(schedule, NOW_MS)
    schedule = opened.open()

    assert 3 in {len(bucket.runs) for bucket in schedule._state.buckets.values()}
    for batch in schedule.unsettled():
        schedule.fired(batch.number)
    assert of_topics(schedule, NOW_MS + 30 * DAY_MS + 200)[-40:] == [*WEEKS, "w99"]


def test_cancels_and_repeats_of_what_version_1_took_are_answered_as_ever(opened: Opened) -> None:
    schedule = opened.open()
    now_ms = NOW_MS + 1_000

    ids = ["w03", "w07", "q0", "q1", "f0", "f2", "b1", "b5", "p1", "early", "nobody"]
    assert schedule.cancel(ids, now_ms=now_ms) == [
        "canceled", "canceled", "canceled", "canceled", "too_late", "canceled", "too_late", "canceled", "too_late",
        "unknown", "unknown",
    ]  # fmt: skip
    repeats = [timed(one, NOW_MS + DAY_MS) for one in ("w00", "b6", "f1", "q2")]
    assert set(schedule.schedule(repeats, now_ms=now_ms)) == {"duplicate"}


def test_a_piece_of_the_id_index_in_a_flush_of_version_1_is_where_it_was() -> None:
    flushed = ["flushed", [], ["ids-000000000001", 7, NOW_MS, 300, 40], 8, []]

    record = records.decode(msgspec.msgpack.encode(flushed))

    piece = records.StoredIndex("ids-000000000001", 7, 300, 40)
    assert record == records.Flushed([], piece, 8, [])
    assert records.decode(records.encode(record)) == record


@pytest.mark.parametrize("count", range(1, 6))
def test_messages_of_version_1_are_never_taken_for_those_of_this_one(count: int) -> None:
    entries = [Entry(0, seq, f"id{seq}", "t", b"payload") for seq in range(count)]

    stored = decode_messages(msgspec.msgpack.encode([(one.id, one.topic, one.payload) for one in entries]))

    assert stored == Stored([one.id for one in entries], [one.payload for one in entries])
