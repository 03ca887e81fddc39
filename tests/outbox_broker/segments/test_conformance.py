"""What the segments of every medium do: the port's one suite. On real bookies tests/engines runs it, too."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox_broker.segments.port import RecordDamaged, WriterFenced, read_record
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import SegmentKind
from tests.outbox_broker.segments.written_log import (
    Medium,
    WrittenSegment,
    end_of,
    names,
    payloads,
    read_all,
)

PAYLOADS = [b"a", bytes(range(256)) * 40, b"c"]
WAIT_SECONDS = 120
WRITERS = 321
OPENINGS = 50
ROUNDS = 1_000


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns between any two instructions: a race that has a window shows in some hundred rounds."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_blocks_come_back_at_any_position_and_size_committed_or_not(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments, first=7_000_000_000)
    written.append(*PAYLOADS)
    written.append(b"other")

    for _ in range(2):
        assert read_all(segments, written.places) == [*PAYLOADS, b"other"]
        whole = segments.read("a", 0, written.writer.end)
        assert len(whole) == written.writer.end
        for position in (0, 1, 43, 44, 45, 500, written.writer.end - 1):
            for size_bytes in (1, 2, 44, 10_000, 10**6):
                assert segments.read("a", position, size_bytes) == whole[position : position + size_bytes]
        written.commit()

    assert payloads(segments) == [*PAYLOADS, b"other"]
    [info] = segments.list()
    assert (info.name, info.kind, info.first, info.epoch) == (
        "a", SegmentKind.MESSAGES, 7_000_000_000, segments.epoch,
    )  # fmt: skip


def test_what_was_committed_is_there_for_the_next_owner_and_the_one_after(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append_committed(*PAYLOADS)
    written.append(b"not committed")

    second = medium.open()
    found = payloads(second)
    assert found[:3] == PAYLOADS
    assert found[3:] in ([], [b"not committed"])
    assert read_all(second, written.places[:3]) == PAYLOADS
    third = medium.open()

    assert payloads(third) == found, "what an owner has read, the next one reads"
    assert segments.epoch < second.epoch < third.epoch


def test_a_log_goes_on_where_its_newest_segment_ends_or_in_another_one(medium: Medium) -> None:
    written, first, newest = [], 0, ""
    for opening in range(6):
        segments = medium.open()
        writer = segments.reopen(newest, end=end_of(segments, newest)) if newest else None
        if writer is None:
            newest = f"log-{opening}"
            writer = segments.create(newest, kind=SegmentKind.MESSAGES, first=first)
        else:
            first -= writer.end
        one = WrittenSegment(writer, first=first)
        written.append(b"%d" % opening)
        first += one.append_committed(written[-1])

    segments = medium.open()
    assert [payload for info in segments.list() for payload in payloads(segments, info.name)] == written


def test_an_owner_that_was_succeeded_acknowledges_nothing_and_nothing_of_it_is_read(medium: Medium) -> None:
    paused = medium.open()
    one, two = WrittenSegment.create(paused), WrittenSegment.create(paused, "b")
    one.append_committed(b"acknowledged")
    two.append_committed(b"acknowledged")
    segments = medium.open()
    segments.delete(["b"])

    for late in (
        lambda: one.append_committed(b"late"),
        lambda: two.append_committed(b"late"),
        lambda: WrittenSegment.create(paused, "c").append_committed(b"late"),
        lambda: paused.delete(["a"]),
    ):
        with pytest.raises(WriterFenced):
            late()
    with pytest.raises(WriterFenced):
        paused.check()

    third = medium.open()
    assert payloads(third) == [b"acknowledged"]
    assert names(third) == ["a"]


def test_callers_that_commit_at_once_share_the_work_and_each_has_its_own_durable(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    lock = threading.Lock()

    def publish(number: int) -> None:
        for part in range(10):
            with lock:
                end = written.append(b"%d-%d" % (number, part))
            assert written.writer.commit(end) >= end

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(publish, number) for number in range(8)]:
            done.result(WAIT_SECONDS)

    successor = medium.open()
    found = payloads(successor)
    assert sorted(found) == sorted(b"%d-%d" % (number, part) for number in range(8) for part in range(10))
    assert read_all(successor, written.places) == found, "in the order of their appends"


def test_a_sealed_segment_has_its_end_and_takes_no_more(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append(*PAYLOADS)

    for _ in range(2):
        written.writer.seal()

    with pytest.raises(StorageFailed, match="sealed"):
        written.append(b"more")
    assert written.writer.commit() == written.writer.end
    for owner in (segments, medium.open()):
        assert payloads(owner) == PAYLOADS
        assert read_all(owner, written.places) == PAYLOADS


@pytest.mark.parametrize("size_bytes", [0, 70_000])
def test_a_segment_that_is_sealed_right_behind_a_commit_is_whole(medium: Medium, size_bytes: int) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append_committed(b"first")
    blocks = [b"%d" % number + bytes(size_bytes) for number in range(3)]
    for one in blocks:
        written.append(one)

    written.commit()
    written.writer.seal()
    WrittenSegment.create(segments, "b").append_committed(b"so that the seal is durable, too")
    segments.close()

    for _ in range(2):
        owner = medium.open()
        assert payloads(owner) == [b"first", *blocks]
        assert read_all(owner, written.places) == [b"first", *blocks]


def test_what_was_cut_is_behind_the_end_and_what_is_appended_then_is_found_where_it_is_said_to_be(
    medium: Medium,
) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    kept = written.append_committed(b"kept")
    written.append(b"forgotten")
    written.append_committed(b"forgotten, too")

    written.writer.cut(kept)
    written.writer.cut(kept)
    written.append(b"behind")
    written.commit()

    for owner in (segments, medium.open()):
        assert read_all(owner, [written.places[0], written.places[-1]]) == [b"kept", b"behind"]


def test_an_append_waits_for_nobody_and_a_commit_takes_all_of_them(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)

    for number in range(300):
        written.append(b"%d" % number)
    written.commit()

    assert payloads(medium.open()) == [b"%d" % number for number in range(300)]


def test_blocks_of_many_mebibytes_are_written_and_read_in_parts_of_any_size(medium: Medium) -> None:
    large = bytes(range(256)) * (36 * 1024) + b"tail"
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append(b"before")
    written.append(large)
    written.append_committed(b"behind")

    for owner in (segments, medium.open()):
        assert payloads(owner) == [b"before", large, b"behind"]
        assert read_all(owner, written.places[::-1]) == [b"behind", large, b"before"]
        begin = written.places[1].position + 16
        assert owner.read("a", begin + 8_000_000, 500_000) == large[8_000_000:8_500_000]


def test_hundreds_of_segments_are_written_at_once(medium: Medium) -> None:
    segments = medium.open()
    written = [WrittenSegment.create(segments, f"s-{number}") for number in range(WRITERS)]
    for round_ in range(2):
        for one in written:
            one.append(b"%d of %s" % (round_, one.writer.name.encode()))
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(one.commit) for one in written]:
                done.result(WAIT_SECONDS)

    for owner in (segments, medium.open()):
        assert names(owner) == sorted(one.writer.name for one in written)
        assert [read_all(owner, one.places) for one in written] == [
            [b"%d of %s" % (round_, one.writer.name.encode()) for round_ in range(2)] for one in written
        ]


def test_segments_are_deleted_for_good_and_a_name_can_be_used_again(medium: Medium) -> None:
    segments = medium.open()
    for name in ("l0m-2-1", "l0m-10-1", "log-1"):
        WrittenSegment.create(segments, name).append_committed(b"old")

    segments.delete(["l0m-2-1", "never-made"])
    segments.delete([])
    assert names(segments) == ["l0m-10-1", "log-1"]
    WrittenSegment.create(segments, "l0m-2-1").append_committed(b"new")
    WrittenSegment.create(segments, "log-1").append_committed(b"instead")

    for owner in (segments, medium.open()):
        assert [payloads(owner, name) for name in names(owner)] == [[b"old"], [b"new"], [b"instead"]]


def test_a_commit_of_a_segment_that_was_deleted_returns_and_fails_nobody(medium: Medium) -> None:
    segments = medium.open()
    deleted, other = WrittenSegment.create(segments), WrittenSegment.create(segments, "b")
    deleted.append_committed(b"1")
    deleted.append(b"2")
    segments.delete(["a"])

    deleted.commit()
    deleted.writer.abandon()
    with pytest.raises(StorageFailed, match=r"sealed|deleted"):
        deleted.append(b"3")
    other.append_committed(b"1")

    assert names(medium.open()) == ["b"]


def beside(work: Callable[[], None], ends: tuple[type[Exception], ...]) -> Callable[[], None]:
    """Begins to repeat some work in a thread, until it ends with one of these errors; returns what waits for that."""
    begun, ended = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            while True:
                work()
                begun.set()
        except ends:
            pass
        except BaseException as error:
            failures.append(error)
        begun.set()
        ended.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    assert begun.wait(WAIT_SECONDS)

    def wait() -> None:
        assert ended.wait(WAIT_SECONDS)
        thread.join(WAIT_SECONDS)
        assert failures == []

    return wait


@pytest.mark.usefixtures("switching_often")
def test_who_commits_a_segment_while_it_is_deleted_is_told_of_no_failure(medium: Medium) -> None:
    segments = medium.open()
    ended: list[int | StorageFailed] = []

    def commit(written: WrittenSegment, begin: threading.Event) -> None:
        assert begin.wait(WAIT_SECONDS)
        try:
            ended.append(written.writer.commit())
        except StorageFailed as error:
            ended.append(error)

    for number in range(ROUNDS):
        written, begin = WrittenSegment.create(segments, name=f"a{number}"), threading.Event()
        written.append(b"x")
        thread = threading.Thread(target=commit, args=(written, begin))
        thread.start()
        begin.set()
        segments.delete([f"a{number}"])
        thread.join(WAIT_SECONDS)

    segments.close()
    assert len(ended) == ROUNDS
    assert [error for error in ended if isinstance(error, StorageFailed)] == []


def test_reads_beside_a_delete_end_with_an_error_and_never_with_other_bytes(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append_committed(b"read")

    def read() -> None:
        assert read_record(segments, written.places[0]) == b"read"

    wait = beside(read, (StorageFailed, RecordDamaged))
    segments.delete(["a"])
    for number in range(10):
        WrittenSegment.create(segments, f"b-{number}").append_committed(b"else")

    wait()


def test_a_close_beside_appends_ends_them_with_an_error_and_keeps_what_was_acknowledged(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    acknowledged: list[bytes] = []

    def publish() -> None:
        written.append_committed(b"%d" % len(acknowledged))
        acknowledged.append(b"%d" % len(acknowledged))

    wait = beside(publish, (StorageFailed,))
    segments.close()
    segments.close()
    wait()

    assert payloads(medium.open())[: len(acknowledged)] == acknowledged


def test_closed_segments_refuse_all(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append_committed(b"1")
    segments.close()

    for refused in (
        lambda: written.append(b"2"),
        written.commit,
        lambda: segments.create("b", kind=SegmentKind.BUCKET),
        lambda: segments.read("a", 0, 1),
        lambda: list(segments.blocks("a")),
        lambda: segments.delete(["a"]),
        segments.check,
    ):
        with pytest.raises(StorageFailed, match="closed"):
            refused()


def test_reading_what_is_not_there_fails_and_a_wrong_place_is_told_as_damage(medium: Medium) -> None:
    segments = medium.open()
    written = WrittenSegment.create(segments)
    written.append_committed(*PAYLOADS)
    [first, second, _] = written.places

    for missing in (lambda: segments.read("b", 0, 1), lambda: list(segments.blocks("b"))):
        with pytest.raises(StorageFailed):
            missing()
    for wrong in (
        {"position": first.position + 1},
        {"number": first.number + 1},
        {"size_bytes": first.size_bytes + 1},
        {"position": 10**6},
        {"position": second.position},
    ):
        fields = {name: getattr(first, name) for name in ("segment", "position", "size_bytes", "number")}
        with pytest.raises(RecordDamaged, match="a: damaged record at"):
            read_record(segments, type(first)(**{**fields, **wrong}))


@pytest.mark.parametrize("name", ["", "../a", "A", "a.b", "x" * 65])
def test_a_name_that_could_mean_something_to_a_medium_is_refused(medium: Medium, name: str) -> None:
    with pytest.raises(ValueError, match="segment's name"):
        medium.open().create(name, kind=SegmentKind.BUCKET)


def test_openings_leave_segments_only_where_something_was_appended(medium: Medium) -> None:
    for opening in range(OPENINGS):
        segments = medium.open()
        written = WrittenSegment.create(segments, f"s-{opening:02d}")
        if opening % 10 == 0:
            written.append_committed(b"%d" % opening)

    assert names(medium.open()) == [f"s-{opening:02d}" for opening in range(0, OPENINGS, 10)]
