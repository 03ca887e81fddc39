"""The schedule as its users see it: due and never early, canceled or delivered, across restarts."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.schedule.levels import BUCKETS_MAX
from outbox_broker.schedule.sorted_run import TimedMessage
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import SEGMENT_HEAD_BYTES
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.messages.limits import CLOCK_DIFFERENCE_MS_MAX
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    NOW_MS,
    SECOND_MS,
    Opened,
    drain,
    flush,
    ids_of_one_hash,
    put,
    recorded,
    settle,
    timed,
)
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
def test_what_is_due_comes_in_order_of_due_time_then_arrival_and_never_early(
    opened: Opened, *, is_flushed: bool
) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("c", NOW_MS + 3), timed("a", NOW_MS + 1), timed("b2", NOW_MS + 2))
    put(schedule, NOW_MS, timed("b1", NOW_MS + 2), timed("past", NOW_MS - DAY_MS))
    if is_flushed:
        flush(schedule, NOW_MS)

    assert drain(schedule, NOW_MS) == ["past"]
    assert drain(schedule, NOW_MS + 1) == ["a"]
    assert drain(schedule, NOW_MS + 10) == ["b2", "b1", "c"]
    assert schedule.queries.count() == 0


def test_two_years_and_not_a_millisecond_more(opened: Opened) -> None:
    schedule = opened.open()
    last_ms = NOW_MS + 731 * DAY_MS + CLOCK_DIFFERENCE_MS_MAX  # which the publisher's clock may be ahead

    assert schedule.schedule([timed("a", last_ms), timed("b", last_ms + 1)], now_ms=NOW_MS) == ["stored", "rejected"]
    flush(schedule, NOW_MS)

    assert drain(schedule, last_ms - 1) == []
    assert drain(schedule, last_ms) == ["a"]


def test_a_message_moves_down_the_levels_and_fires_on_time(opened: Opened) -> None:
    schedule = opened.open()
    due_ms = NOW_MS + 30 * DAY_MS + 12_345
    put(schedule, NOW_MS, timed("a", due_ms))
    flush(schedule, NOW_MS)
    levels = []

    for now_ms in (NOW_MS, due_ms - 7 * DAY_MS, due_ms - DAY_MS, due_ms - 59 * MINUTE_MS, due_ms - SECOND_MS):
        settle(schedule, now_ms)
        [bucket] = recorded(opened).buckets
        levels.append(bucket.level)
        assert drain(schedule, now_ms) == []

    assert levels == sorted(levels)
    assert levels[0] == 0
    assert levels[-1] == 3
    assert drain(schedule, due_ms) == ["a"]


def test_what_fell_due_while_nobody_ran_fires_in_order_from_whatever_level_it_stands_on(opened: Opened) -> None:
    schedule = opened.open()
    ahead = [40 * DAY_MS, 3 * DAY_MS, 20 * DAY_MS, 5 * HOUR_MS, 70_000, 300 * DAY_MS, 10]
    put(schedule, NOW_MS, *(timed(f"m{one}", NOW_MS + one) for one in ahead))
    flush(schedule, NOW_MS)

    schedule = opened.open()

    assert drain(schedule, NOW_MS + 299 * DAY_MS) == [f"m{one}" for one in sorted(ahead)[:-1]]
    assert drain(schedule, NOW_MS + 301 * DAY_MS) == [f"m{300 * DAY_MS}"]
    settle(schedule, NOW_MS + 301 * DAY_MS)
    assert schedule.queries.figures()["buckets"] == 0


def test_segments_behind_are_deleted(opened: Opened) -> None:
    schedule = opened.open(memory_messages_max=10)
    for number in range(50):
        put(schedule, NOW_MS, timed(f"m{number}", NOW_MS + number * 20 * DAY_MS // 50))

    for day in range(21):
        drain(schedule, NOW_MS + day * DAY_MS)
        settle(schedule, NOW_MS + day * DAY_MS)
    for _ in range(2):
        flush(schedule, NOW_MS + 21 * DAY_MS)
        settle(schedule, NOW_MS + 21 * DAY_MS)

    assert [path.name[:3] for path in opened.folder.glob("l*-*.segment")] == ["log", "log"], "two checkpoints"


def test_a_schedule_over_two_years_is_at_most_286_buckets_however_many_messages(opened: Opened) -> None:
    schedule = opened.open()
    ahead = [*range(0, 2 * HOUR_MS, 30_000), *range(0, 2 * DAY_MS, 900_000), *range(0, 731 * DAY_MS, 6 * HOUR_MS)]

    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS + one) for number, one in enumerate(ahead)))
    flush(schedule, NOW_MS)

    assert 270 <= schedule.queries.figures()["buckets"] <= BUCKETS_MAX


def test_after_a_restart_a_batch_that_was_out_comes_again_whole_and_a_settled_one_does_not(opened: Opened) -> None:
    schedule = opened.open(batch_messages_max=2)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(6)))
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, timed("late", NOW_MS + 9))
    first, second = schedule.due(NOW_MS + 10), schedule.due(NOW_MS + 10)
    assert first is not None
    assert second is not None
    schedule.fired(first.number)
    schedule.cancel(["unknown"], now_ms=NOW_MS)  # syncs

    schedule = opened.open()

    assert schedule.due(NOW_MS) == second  # although the clock says that it is not due
    assert drain(schedule, NOW_MS + 10) == ["m4", "m5", "late"]


def test_what_was_out_from_memory_survives_a_flush_and_a_restart(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS), timed("b", NOW_MS + 1))
    batch = schedule.due(NOW_MS)
    flush(schedule, NOW_MS)

    schedule = opened.open()

    assert schedule.due(NOW_MS) == batch
    assert drain(schedule, NOW_MS + 1) == ["b"]


def test_no_more_is_handed_out_than_the_bound_allows(opened: Opened) -> None:
    schedule = opened.open(batch_messages_max=1, hand_outs_max=2)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS) for number in range(3)))

    first = schedule.due(NOW_MS)
    assert first is not None
    assert schedule.due(NOW_MS) is not None
    assert schedule.due(NOW_MS) is None
    schedule.fired(first.number)
    schedule.fired(first.number)

    assert schedule.due(NOW_MS) is not None


# -- canceling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_canceled_message_never_comes_and_canceling_it_again_says_the_same(
    opened: Opened, *, is_flushed: bool, is_restarted: bool
) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS + 5), timed("b", NOW_MS + 5), timed("far", NOW_MS + 50 * DAY_MS))
    if is_flushed:
        flush(schedule, NOW_MS)

    assert schedule.cancel(["a", "far", "nobody", "a"], now_ms=NOW_MS) == [
        "canceled",
        "canceled",
        "unknown",
        "canceled",
    ]
    if is_restarted:
        schedule = opened.open()

    assert schedule.cancel(["a", "far"], now_ms=NOW_MS) == ["canceled", "canceled"]
    assert schedule.queries.find("a") is None
    assert schedule.queries.count() == 1
    assert drain(schedule, NOW_MS + 100 * DAY_MS) == ["b"]


def test_a_cancel_holds_for_both_copies_of_a_message_that_was_repeated_after_its_id_was_forgotten(
    opened: Opened,
) -> None:
    schedule = opened.open(dedup_messages=3)
    twice = timed("twice", NOW_MS + 30 * DAY_MS)
    put(schedule, NOW_MS, twice)
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS) for number in range(5)))
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, twice)  # the first one is in a bucket, the second one in memory

    assert schedule.cancel(["twice"], now_ms=NOW_MS) == ["canceled"]

    assert drain(schedule, NOW_MS + 40 * DAY_MS) == [f"m{number}" for number in range(5)]
    assert schedule.queries.count() == 0


def test_a_message_is_canceled_on_whatever_level_it_stands(opened: Opened) -> None:
    schedule = opened.open()
    due_ms = NOW_MS + 30 * DAY_MS
    put(schedule, NOW_MS, *(timed(f"m{number}", due_ms) for number in range(6)))
    flush(schedule, NOW_MS)

    for number, ahead_ms in enumerate((30 * DAY_MS, 7 * DAY_MS, DAY_MS, HOUR_MS, MINUTE_MS)):
        settle(schedule, due_ms - ahead_ms)
        assert schedule.cancel([f"m{number}"], now_ms=due_ms - ahead_ms) == ["canceled"]
    schedule = opened.open()

    assert drain(schedule, due_ms) == ["m5"]


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
def test_a_cancel_is_too_late_from_the_hand_out_on_also_after_a_restart(opened: Opened, *, is_flushed: bool) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS))
    if is_flushed:
        flush(schedule, NOW_MS)

    batch = schedule.due(NOW_MS)
    assert schedule.cancel(["a"], now_ms=NOW_MS) == ["too_late"]
    schedule = opened.open()
    assert schedule.cancel(["a"], now_ms=NOW_MS) == ["too_late"]
    assert schedule.due(NOW_MS) == batch
    schedule.fired(1)
    assert schedule.cancel(["a"], now_ms=NOW_MS) == ["too_late"]
    settle(schedule, NOW_MS)
    flush(schedule, NOW_MS)
    assert opened.open().cancel(["a"], now_ms=NOW_MS) == ["too_late"]


def test_a_cancel_is_too_late_for_a_batch_that_its_target_has_not_taken_for_days(opened: Opened) -> None:
    schedule = opened.open(dedup_messages=0, index_pieces_max=1, index_merged_pieces_max=2)
    put(schedule, NOW_MS, timed("bucket", NOW_MS))
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, timed("memory", NOW_MS))
    assert schedule.due(NOW_MS) is not None

    for day in range(1, 5):
        put(schedule, NOW_MS + day * DAY_MS, timed(f"day-{day}", NOW_MS + 365 * DAY_MS))
        flush(schedule, NOW_MS + day * DAY_MS)
        settle(schedule, NOW_MS + day * DAY_MS)

    assert schedule.cancel(["bucket", "memory"], now_ms=NOW_MS + 4 * DAY_MS) == ["too_late"] * 2


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("clock_step_ms", [0, -HOUR_MS])
def test_a_cancel_is_too_late_for_what_was_handed_out_while_memory_was_flushed(
    opened: Opened, clock_step_ms: int, *, is_restarted: bool
) -> None:
    disk = FailingStorage()
    schedule = opened.open(storage=disk)
    put(schedule, NOW_MS, timed("a", NOW_MS + 10), timed("gone", NOW_MS + 10), timed("later", NOW_MS + 20))
    fired: list[str] = []

    def fire(call: str) -> None:
        if call == "create" and not fired:  # the first bucket of the flush, which holds no lock
            fired.append("begun")
            assert schedule.cancel(["gone"], now_ms=NOW_MS) == ["canceled"]
            fired.extend(drain(schedule, NOW_MS + 10))

    disk.before = fire
    flush(schedule, NOW_MS)
    if is_restarted:
        schedule = opened.open()

    now_ms = NOW_MS + 10 + clock_step_ms
    assert fired == ["begun", "a"]
    assert schedule.cancel(["a", "gone", "later"], now_ms=now_ms) == ["too_late", "canceled", "canceled"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_cancel_that_comes_before_its_publish_wins(opened: Opened, *, is_restarted: bool) -> None:
    schedule = opened.open()
    assert schedule.cancel(["a"], now_ms=NOW_MS) == ["unknown"]
    flush(schedule, NOW_MS)
    if is_restarted:
        schedule = opened.open()

    assert schedule.schedule([timed("a", NOW_MS + 1), timed("b", NOW_MS + 1)], now_ms=NOW_MS) == ["stored", "stored"]

    assert drain(schedule, NOW_MS + 1) == ["b"]
    assert schedule.cancel(["a"], now_ms=NOW_MS) == ["canceled"]
    assert opened.open().cancel(["a"], now_ms=NOW_MS) == ["canceled"]


def test_cancels_are_remembered_within_bounds_of_count_and_time(opened: Opened) -> None:
    schedule = opened.open(cancels_remembered_max=2)
    for message_id in ("a", "b", "c"):
        schedule.cancel([message_id], now_ms=NOW_MS)
    schedule.cancel(["d"], now_ms=NOW_MS + 8 * DAY_MS)

    put(schedule, NOW_MS, *(timed(one, NOW_MS) for one in "abcd"))

    assert drain(schedule, NOW_MS) == ["a", "b", "c"]


def test_a_batch_whose_messages_were_all_canceled_holds_nothing_up(opened: Opened) -> None:
    schedule = opened.open(batch_messages_max=2)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS) for number in range(5)))
    flush(schedule, NOW_MS)
    schedule.cancel([f"m{number}" for number in range(4)], now_ms=NOW_MS)

    assert drain(schedule, NOW_MS) == ["m4"]
    settle(schedule, NOW_MS + MINUTE_MS)
    assert schedule.queries.figures()["buckets"] == 0


# -- duplicates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_repeated_publish_is_a_duplicate(opened: Opened, *, is_flushed: bool, is_restarted: bool) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS), timed("b", NOW_MS + DAY_MS))
    drain(schedule, NOW_MS)
    if is_flushed:
        flush(schedule, NOW_MS)
    if is_restarted:
        schedule = opened.open()

    statuses = schedule.schedule([timed(one, NOW_MS + 5) for one in ("a", "b", "c", "c")], now_ms=NOW_MS)

    assert statuses == ["duplicate", "duplicate", "stored", "duplicate"]
    assert drain(schedule, NOW_MS + 10) == ["c"]


# -- the clock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [-30 * DAY_MS, -HOUR_MS, -1, 1, HOUR_MS, 10 * DAY_MS])
def test_a_clock_step_loses_nothing_and_fires_nothing_early_by_the_new_clock(opened: Opened, step_ms: int) -> None:
    schedule = opened.open(memory_messages_max=20, expand_messages_max=7)
    waiting = {f"m{number}": NOW_MS + number * 10_007_000 for number in range(400)}
    put(schedule, NOW_MS, *(timed(*one) for one in waiting.items()))
    now_ms = NOW_MS

    for step in range(100):
        now_ms += HOUR_MS // 2 + (step_ms if step == 10 else 0)
        settle(schedule, now_ms)
        due = sorted((one for one in waiting if waiting[one] <= now_ms), key=lambda one: waiting[one])
        assert drain(schedule, now_ms) == due
        for one in due:
            del waiting[one]
        waiting[f"after-{step}"] = now_ms + 40 * DAY_MS
        put(schedule, now_ms, timed(f"after-{step}", now_ms + 40 * DAY_MS))

    assert drain(schedule, now_ms + 200 * DAY_MS) == sorted(waiting, key=lambda one: waiting[one])


# -- looking at it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_flushed", [False, True], ids=["in_memory", "in_buckets"])
def test_what_fires_when_is_counted_per_minute_hour_and_day_by_topic(opened: Opened, *, is_flushed: bool) -> None:
    schedule = opened.open()
    day_ms = NOW_MS // DAY_MS * DAY_MS + DAY_MS
    put(
        schedule, NOW_MS, timed("a", day_ms + 1), timed("b", day_ms + 59_999), timed("gone", day_ms),
        timed("c", day_ms + MINUTE_MS, topic="u"), timed("d", day_ms + HOUR_MS), timed("e", day_ms + 40 * DAY_MS),
    )  # fmt: skip
    if is_flushed:
        flush(schedule, NOW_MS)
    schedule.cancel(["gone"], now_ms=NOW_MS)

    def counts(bucket_ms: int, topic: str | None = None, to_ms: int = day_ms + DAY_MS) -> list[tuple[int, int]]:
        found = schedule.queries.histogram(topic=topic, from_ms=day_ms, to_ms=to_ms, bucket_ms=bucket_ms)
        return [((start_ms - day_ms) // bucket_ms, count) for start_ms, count in found]

    assert counts(MINUTE_MS) == [(0, 2), (1, 1), (60, 1)]
    assert counts(HOUR_MS) == [(0, 3), (1, 1)]
    assert counts(DAY_MS, to_ms=1 << 60) == [(0, 4), (40, 1)]
    assert counts(DAY_MS, topic="u", to_ms=1 << 60) == [(0, 1)]
    assert counts(DAY_MS, topic="nobody") == []
    assert schedule.queries.topics() == {"t": 4, "u": 1}
    assert (schedule.queries.count(), schedule.queries.count("u"), schedule.queries.count("nobody")) == (5, 1, 0)
    found = schedule.queries.find("c")
    assert found is not None
    assert (found.topic, found.due_ms) == ("u", day_ms + MINUTE_MS)
    assert schedule.queries.find("gone") is None
    assert schedule.queries.next_due_ms() in {day_ms, day_ms + 1}


def test_the_next_due_time_is_known_wherever_the_message_stands(opened: Opened) -> None:
    schedule = opened.open()
    assert schedule.queries.next_due_ms() is None

    put(schedule, NOW_MS, timed("far", NOW_MS + 50 * DAY_MS))
    assert schedule.queries.next_due_ms() == NOW_MS + 50 * DAY_MS
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, timed("near", NOW_MS + 50))
    assert schedule.queries.next_due_ms() == NOW_MS + 50
    assert drain(schedule, NOW_MS + 50) == ["near"]

    assert schedule.queries.next_due_ms() == NOW_MS + 50 * DAY_MS


# -- the id index --------------------------------------------------------------------------------------------------


def test_ids_are_found_while_the_index_is_merged_and_after_a_restart(opened: Opened) -> None:
    schedule = opened.open(memory_messages_max=300, index_pieces_max=4, index_merged_pieces_max=3)
    ids = [f"m{number}" for number in range(6_000)]
    for start in range(0, len(ids), 100):
        put(schedule, NOW_MS, *(timed(one, NOW_MS + 5 * DAY_MS + len(one)) for one in ids[start : start + 100]))
        schedule.housekeeping.step(NOW_MS)
    settle(schedule, NOW_MS)
    flush(schedule, NOW_MS)

    assert schedule.queries.figures()["id_index_pieces"] <= 4
    assert all(schedule.queries.find(one) is not None for one in ids)
    schedule = opened.open()
    assert set(schedule.cancel(ids[::2], now_ms=NOW_MS)) == {"canceled"}
    assert schedule.cancel(["m6000"], now_ms=NOW_MS) == ["unknown"]
    assert sorted(drain(schedule, NOW_MS + 6 * DAY_MS)) == sorted(ids[1::2])


def test_pieces_merged_twice_in_a_row_do_not_overwrite_each_other(opened: Opened) -> None:
    schedule = opened.open(index_pieces_max=1, index_merged_pieces_max=2)
    for number in range(5):
        put(schedule, NOW_MS, timed(f"m{number}", NOW_MS + DAY_MS))
        flush(schedule, NOW_MS)

    settle(schedule, NOW_MS)
    assert schedule.queries.figures()["id_index_pieces"] == 1
    flush(schedule, NOW_MS)  # from here on the merges count
    schedule = opened.open()

    assert schedule.cancel([f"m{number}" for number in range(5)], now_ms=NOW_MS) == ["canceled"] * 5


def test_the_index_forgets_what_fired_long_ago(opened: Opened) -> None:
    schedule = opened.open(
        memory_messages_max=10, dedup_messages=10, index_pieces_max=2, index_merged_pieces_max=2
    )  # fmt: skip
    for number in range(400):
        now_ms = NOW_MS + number * HOUR_MS
        put(schedule, now_ms, timed(f"m{number}", now_ms + 1))
        drain(schedule, now_ms + 1)
        settle(schedule, now_ms + 1)

    flush(schedule, now_ms + 1)
    assert sum(one.count for one in recorded(opened).index) < 100
    assert schedule.cancel(["m399", "m0"], now_ms=now_ms) == ["too_late", "unknown"]


def test_two_ids_with_one_hash_are_told_apart(opened: Opened) -> None:
    a, b, c = ids_of_one_hash(3)
    schedule = opened.open(dedup_messages=0)
    put(schedule, NOW_MS, timed(a, NOW_MS + 1), timed(b, NOW_MS + 2))
    flush(schedule, NOW_MS)
    flush(schedule, NOW_MS)

    assert schedule.cancel([b, c], now_ms=NOW_MS) == ["canceled", "unknown"]
    assert drain(schedule, NOW_MS + 5) == [a]


def test_a_lower_limit_of_the_log_has_it_flushed_by_housekeeping_and_begun_anew(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS + DAY_MS) for number in range(50)))
    settle(schedule, NOW_MS)
    assert schedule.queries.figures()["buckets"] == 0

    schedule.limit_memory(bytes_max=10**9, messages_max=10**9, log_bytes_max=1_000)
    settle(schedule, NOW_MS)

    assert schedule.queries.figures()["buckets"] == 1
    assert recorded(opened).pending == {}
    flush(schedule, NOW_MS)
    assert schedule.queries.figures()["log_bytes"] < 2_000, "two checkpoints, and a flush"


@pytest.mark.parametrize(("store", "is_restarted"), [("local", False), ("ledgers", False), ("ledgers", True)])
def test_a_log_is_flushed_once_its_records_reach_its_limit_whatever_a_store_adds_to_them(
    tmp_path: Path, store: str, *, is_restarted: bool
) -> None:
    opened = Opened(tmp_path / "delay", opener=LedgerCluster().open if store == "ledgers" else None)
    schedule = opened.open(log_bytes_max=6_000)

    def put_one_by_one(*numbers: int, in_days: int) -> None:
        for number in numbers:
            put(schedule, NOW_MS, timed(f"m{number:02}", NOW_MS + in_days * DAY_MS))
        settle(schedule, NOW_MS)

    put_one_by_one(*range(40), in_days=1)
    assert schedule.queries.figures()["buckets"] == 0, "5,400 bytes"
    if is_restarted:  # on ledgers, where it goes on in the log that it finds
        schedule = opened.open()
    put_one_by_one(*range(40, 80), in_days=1)
    assert schedule.queries.figures()["buckets"] == 1
    put_one_by_one(*range(80, 85), in_days=20)
    assert schedule.queries.figures()["buckets"] == 1, "it begins anew"
    opened.drop()


# -- trouble -------------------------------------------------------------------------------------------------------


def test_a_schedule_opens_on_a_full_disk_and_proves_its_log_when_there_is_room(opened: Opened) -> None:
    put(opened.open(), NOW_MS, timed("a", NOW_MS))
    disk = FailingStorage()
    disk.room_bytes = 10

    schedule = opened.open(storage=disk)

    assert schedule.queries.count() == 1
    disk.mend()
    assert drain(schedule, NOW_MS) == ["a"]
    put(opened.open(), NOW_MS, timed("b", NOW_MS))
    assert drain(opened.open(), NOW_MS) == ["b"]
    assert len(list(opened.folder.glob("log-*.segment"))) == 1


def test_a_full_disk_refuses_what_comes_keeps_what_is_and_goes_on_when_there_is_room(opened: Opened) -> None:
    disk = FailingStorage()
    schedule = opened.open(storage=disk, memory_messages_max=4)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(4)))
    disk.room_bytes = 10

    for _ in range(3):
        with pytest.raises(StorageFailed):
            schedule.schedule([timed("refused", NOW_MS)], now_ms=NOW_MS)
        with pytest.raises(StorageFailed):
            schedule.due(NOW_MS + 1)
        with pytest.raises(StorageFailed):
            schedule.cancel(["m0"], now_ms=NOW_MS)
        with pytest.raises(StorageFailed):
            schedule.housekeeping.step(NOW_MS)
    disk.mend()

    put(schedule, NOW_MS, timed("taken", NOW_MS + 9))
    assert drain(schedule, NOW_MS + 10) == ["m0", "m1", "m2", "m3", "taken"]
    assert drain(opened.open(), NOW_MS + 10) == []


def test_what_cannot_be_read_for_now_is_handed_out_later_with_what_was_taken_before_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = opened.open(memory_messages_max=2)
    for number in range(0, 6, 2):
        put(schedule, NOW_MS, timed(f"m{number}", NOW_MS + number), timed(f"m{number + 1}", NOW_MS + number + 1))
        flush(schedule, NOW_MS)
    assert opened.segments is not None
    read, calls = opened.segments.read, count(1)

    def failing(name: str, position: int, size_bytes: int) -> bytes:
        if next(calls) == 4:
            raise StorageFailed("cannot read it for now")
        return read(name, position, size_bytes)

    monkeypatch.setattr(opened.segments, "read", failing)

    with pytest.raises(StorageFailed, match="for now"):
        schedule.due(NOW_MS + 10)
    assert drain(schedule, NOW_MS + 10) == [f"m{number}" for number in range(6)]


def test_a_failed_sync_is_final_and_answers_nothing(opened: Opened) -> None:
    disk = FailingStorage()
    schedule = opened.open(storage=disk)
    disk.fail("sync")

    with pytest.raises(StorageFailed, match="did not confirm"):
        schedule.schedule([timed("a", NOW_MS)], now_ms=NOW_MS)
    disk.mend()

    with pytest.raises(StorageFailed, match="restarted"):
        schedule.schedule([timed("b", NOW_MS)], now_ms=NOW_MS)


def with_days(opened: Opened) -> DelayStore:
    """Three messages on each of three days, in a bucket each."""
    schedule = opened.open()
    for day in (1, 2, 3):
        put(schedule, NOW_MS, *(timed(f"d{day}-{number}", NOW_MS + day * DAY_MS) for number in range(3)))
        flush(schedule, NOW_MS)
    settle(schedule, NOW_MS)
    return schedule


def test_a_flipped_bit_costs_its_message_alone_and_is_said_and_everything_else_fires(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    with_days(opened)
    damaged = flipped(opened.folder, needle=b"payload of d2-1")

    schedule = opened.open()

    came = [f"d{day}-{number}" for day in (1, 2, 3) for number in range(3)]
    came.remove("d2-1")
    assert drain(schedule, NOW_MS + 4 * DAY_MS) == came
    for one in (schedule, opened.open()):
        figures = one.queries.figures()
        assert (figures["quarantined_runs"], figures["quarantined_messages"], figures["scheduled"]) == (1, 1, 0)
    [told] = [one for one in caplog.records if event_name(one) == "run_quarantined"]
    assert (vars(told)["messages"], f"{vars(told)['segment']}.segment") == (1, damaged.name)
    schedule = opened.open()
    settle(schedule, NOW_MS + 9 * DAY_MS)
    assert damaged.exists(), "it is kept for whoever can mend it"
    assert drain(schedule, NOW_MS + 9 * DAY_MS) == []


@pytest.mark.parametrize("is_met", [False, True], ids=["at_once", "after_the_others_fired"])
def test_a_cancel_of_what_is_damaged_promises_nothing_and_one_beside_it_is_heard(
    opened: Opened, *, is_met: bool
) -> None:
    with_days(opened)
    flipped(opened.folder, needle=b"payload of d2-1")
    schedule = opened.open()
    now_ms = NOW_MS
    if is_met:
        now_ms = NOW_MS + 2 * DAY_MS
        drain(schedule, now_ms)

    statuses = schedule.cancel(["d2-1", "d2-0", "d3-0"], now_ms=now_ms)

    assert statuses == ["unknown", "too_late" if is_met else "canceled", "canceled"]
    assert schedule.queries.find("d2-1") is None
    assert opened.open().cancel(["d2-1"], now_ms=now_ms) == ["unknown"]


@pytest.mark.parametrize("record", range(2), ids=["columns", "spare"])
def test_a_flipped_bit_in_what_a_run_has_twice_costs_nothing(opened: Opened, record: int) -> None:
    schedule = with_days(opened)
    run, bucket = next(iter(recorded(opened).bucket_of.items()))
    one = bucket.runs[run]
    position = (one.position, one.spare_position)[record]
    opened.drop()
    flip_at(opened.folder / f"{one.segment}.segment", SEGMENT_HEAD_BYTES + position + 20)

    schedule = opened.open()

    assert len(drain(schedule, NOW_MS + 4 * DAY_MS)) == 9
    assert schedule.queries.figures()["quarantined_messages"] == 0


def test_a_run_of_which_nothing_can_be_proven_is_set_aside_whole(opened: Opened) -> None:
    with_days(opened)
    state = recorded(opened)
    [bucket] = [one for one in state.buckets.values() if one.id.start_ms <= NOW_MS + 2 * DAY_MS < one.id.end_ms]
    [run] = bucket.runs.values()
    path = flipped(opened.folder, needle=b"payload of d2-1")
    flip_at(path, SEGMENT_HEAD_BYTES + run.spare_position + 20)
    opened.drop()
    schedule = opened.open()

    came = drain(schedule, NOW_MS + 4 * DAY_MS)

    assert came == [f"d{day}-{number}" for day in (1, 3) for number in range(3)]
    assert schedule.queries.figures()["quarantined_messages"] == 3
    assert schedule.queries.count() == 0
    assert schedule.cancel(["d2-0", "d1-0"], now_ms=NOW_MS + 4 * DAY_MS) == ["unknown", "too_late"]


def test_a_batch_that_is_handed_out_again_leaves_out_what_was_damaged_meanwhile(opened: Opened) -> None:
    schedule = with_days(opened)
    batch = schedule.due(NOW_MS + 2 * DAY_MS)
    assert batch is not None
    flipped(opened.folder, needle=b"payload of d2-1")

    again = opened.open().due(NOW_MS + 2 * DAY_MS)

    assert again is not None
    assert again.ids == [one for one in batch.ids if one != "d2-1"]
    assert existing(opened).queries.figures()["quarantined_messages"] == 1


def test_what_was_delivered_before_its_run_was_damaged_is_not_missed(opened: Opened) -> None:
    schedule = opened.open(batch_messages_max=2)
    put(schedule, NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(4)))
    flush(schedule, NOW_MS)
    batch = schedule.due(NOW_MS + 9)
    assert batch is not None
    schedule.fired(batch.number)
    flush(schedule, NOW_MS)  # the log is not kept behind the second checkpoint
    opened.open()
    flipped(opened.folder, needle=b"payload of m0")

    schedule = opened.open()

    assert drain(schedule, NOW_MS + 9) == ["m2", "m3"]
    assert schedule.queries.figures()["quarantined_runs"] == 0


def test_a_damaged_run_that_is_to_be_refiled_gives_what_can_be_proven(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("bad", NOW_MS + 30 * DAY_MS), timed("beside", NOW_MS + 30 * DAY_MS))
    flush(schedule, NOW_MS)
    put(schedule, NOW_MS, timed("good", NOW_MS + 30 * DAY_MS))
    flush(schedule, NOW_MS)
    settle(schedule, NOW_MS)
    flipped(opened.folder, needle=b"payload of bad")

    schedule = opened.open()
    [bucket] = recorded(opened).buckets
    settle(schedule, bucket.expand_at_ms)

    assert schedule.queries.figures()["quarantined_runs"] == 1
    assert drain(schedule, NOW_MS + 31 * DAY_MS) == ["beside", "good"]


def test_a_damaged_log_is_refused_naming_the_file(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS))
    put(schedule, NOW_MS, timed("b", NOW_MS))
    flipped(opened.folder, needle=b"payload of a")

    with pytest.raises(SegmentDamaged, match="log-"):
        opened.open()


@pytest.mark.parametrize("lost_bytes", [40, 512, 4096])
@pytest.mark.parametrize("segment", ["log", "bucket"])
def test_a_lost_first_page_of_a_segment_is_refused_or_told_and_costs_nothing_else(
    opened: Opened, segment: str, lost_bytes: int
) -> None:
    schedule = opened.open()
    for run in range(3):
        put(schedule, NOW_MS, *(timed(f"{run}-{number:02}", NOW_MS + 40 * DAY_MS) for number in range(50)))
        if segment == "bucket":
            flush(schedule, NOW_MS)
    opened.drop()
    [path] = opened.folder.glob("log-*.segment" if segment == "log" else "l[01]*.segment")
    path.write_bytes(bytes(lost_bytes) + path.read_bytes()[lost_bytes:])

    if segment == "log" and lost_bytes > 40:
        with pytest.raises(SegmentDamaged, match=f"{path.stem}.*restore"):
            opened.open()
        return
    schedule = opened.open()
    came = drain(schedule, NOW_MS + 41 * DAY_MS)
    assert len(came) + schedule.queries.figures()["quarantined_messages"] == 150
    assert [one for one in came if one[0] != "0"] == [f"{run}-{number:02}" for run in (1, 2) for number in range(50)]


def test_a_first_log_whose_heads_are_all_lost_is_refused_and_stays(opened: Opened) -> None:
    put(opened.open(), NOW_MS, *(timed(f"m{number}", NOW_MS + number) for number in range(300)))
    opened.drop()
    [log] = opened.folder.glob("log-*.segment")
    log.write_bytes(bytes(4096) + log.read_bytes()[4096:])

    for _ in range(2):
        with pytest.raises(SegmentDamaged, match=f"restore {log.stem} from a copy"):
            opened.open()


def test_a_log_torn_at_any_byte_of_its_last_record_loses_only_that(opened: Opened) -> None:
    schedule = opened.open()
    put(schedule, NOW_MS, timed("a", NOW_MS))
    [log] = opened.folder.glob("log-*.segment")
    end = log.stat().st_size
    put(schedule, NOW_MS, timed("b", NOW_MS))
    opened.drop()
    whole = log.read_bytes()

    for size in range(end, len(whole)):
        for later in opened.folder.glob("log-*"):
            later.unlink()
        log.write_bytes(whole[:size])
        schedule = opened.open()
        assert (schedule.queries.count(), schedule.queries.find("a") is None) == (1, False), size
        put(schedule, NOW_MS, timed("c", NOW_MS))
        assert opened.open().queries.count() == 2, size
        opened.drop()


def test_a_closed_schedule_refuses(opened: Opened) -> None:
    schedule = opened.open()
    schedule.close()
    schedule.close()

    for refused in (
        lambda: schedule.schedule([timed("a", NOW_MS)], now_ms=NOW_MS),
        lambda: schedule.cancel(["a"], now_ms=NOW_MS),
        lambda: schedule.due(NOW_MS),
        lambda: schedule.fired(1),
        lambda: schedule.housekeeping.step(NOW_MS),
    ):
        with pytest.raises(StorageFailed, match="closed"):
            refused()


def test_a_minute_of_many_messages_is_handed_out_without_holding_them_all(opened: Opened) -> None:
    schedule = opened.open(memory_messages_max=2_000)
    for start in range(0, 20_000, 500):
        many = [TimedMessage(NOW_MS + 5, f"m{start + number}", "t", bytes(500)) for number in range(500)]
        schedule.schedule(many, now_ms=NOW_MS)
    flush(schedule, NOW_MS)

    ids = []
    while (batch := schedule.due(NOW_MS + 5)) is not None:
        ids += [message.id for message in batch.messages]
        schedule.fired(batch.number)
        assert schedule.queries.figures()["in_memory"] == 0

    assert ids == [f"m{number}" for number in range(20_000)]


def flipped(folder: Path, *, needle: bytes) -> Path:
    """Flip a bit in the file that holds this."""
    [path] = [one for one in folder.glob("*.segment") if needle in one.read_bytes()]
    flip_at(path, path.read_bytes().index(needle))
    return path


def flip_at(path: Path, place: int) -> None:
    """Flip a bit of this byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def existing(opened: Opened) -> DelayStore:
    """The schedule that is open."""
    assert opened.schedule is not None
    return opened.schedule
