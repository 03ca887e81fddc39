"""A bucket of few messages is not re-filed: they are dispatched from where they are, in order, and can be canceled."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from outbox_broker.schedule.levels import BucketState
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    HOUR_MS,
    NOW_MS,
    Opened,
    drain,
    flush,
    put,
    recorded,
    settle,
    timed,
)

WEEK_MS = 7 * DAY_MS
BEGIN_MS = (NOW_MS // WEEK_MS + 4) * WEEK_MS
"""The start of a week's bucket."""


def put_in_runs(opened: Opened, *sizes: int, options: dict[str, int]) -> list[str]:
    """Messages that are due in one week, each size of them flushed by itself; returns their ids in order."""
    schedule = opened.open(**options)
    count = 0
    for size in sizes:
        numbers = range(count, count + size)
        put(schedule, NOW_MS, *(timed(f"m{number:03}", BEGIN_MS + number * 7_919_000 % WEEK_MS) for number in numbers))
        flush(schedule, NOW_MS)
        count += size
    settle(schedule, NOW_MS)
    return sorted((f"m{number:03}" for number in range(count)), key=lambda one: int(one[1:]) * 7_919_000 % WEEK_MS)


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_bucket_up_to_the_limit_stays_where_it_is_and_is_dispatched_in_order(
    opened: Opened, *, is_restarted: bool
) -> None:
    ids = put_in_runs(opened, 10, 10, options={"expand_above_messages": 20})
    schedule = opened.open() if is_restarted else opened.schedule
    assert schedule is not None
    segments = opened.segments.list()
    now_ms, came = BEGIN_MS - WEEK_MS, list[str]()

    assert schedule.cancel([ids[3]], now_ms=now_ms) == ["canceled"]
    while now_ms < BEGIN_MS + WEEK_MS:
        settle(schedule, now_ms)
        assert now_ms >= BEGIN_MS or opened.segments.list() == segments
        now_ms += HOUR_MS
        came += drain(schedule, now_ms)
        found = schedule.queries.find(ids[-1])
        assert (found is None) == (ids[-1] in came)

    assert came == [one for one in ids if one != ids[3]]
    settle(schedule, now_ms)
    assert not recorded(opened).buckets


def test_a_bucket_above_the_limit_is_refiled_to_its_last_message(opened: Opened) -> None:
    ids = put_in_runs(opened, 7, 7, 7, options={"expand_above_messages": 20, "expand_messages_max": 7})
    schedule = opened.schedule
    assert schedule is not None
    [week] = recorded(opened).buckets.values()
    assert week.state is BucketState.OPEN

    settle(schedule, BEGIN_MS - WEEK_MS)

    assert not set(week.segments) & {info.name for info in opened.segments.list()}
    assert all(bucket.level > 0 for bucket in recorded(opened).buckets)
    assert drain(schedule, BEGIN_MS + WEEK_MS) == ids


def test_messages_of_one_topic_in_small_buckets_of_several_levels_come_in_the_order_of_their_due_times(
    opened: Opened,
) -> None:
    schedule = opened.open(expand_above_messages=1_000, batch_messages_max=300)
    day_ms = (NOW_MS // DAY_MS + 4) * DAY_MS
    waiting = {f"m{number:03}": day_ms + number * 173_000 for number in range(490)}
    late = {one: due_ms for one, due_ms in waiting.items() if int(one[1:]) % 5 == 0}
    put(schedule, NOW_MS, *(timed(one, due_ms) for one, due_ms in waiting.items() if one not in late))
    flush(schedule, NOW_MS)
    settle(schedule, day_ms - DAY_MS)
    put(schedule, day_ms - DAY_MS, *(timed(one, due_ms) for one, due_ms in late.items()))
    flush(schedule, day_ms - DAY_MS)
    assert {bucket.level for bucket in recorded(opened).buckets} == {1, 2}

    assert drain(schedule, day_ms + DAY_MS) == list(waiting)


def test_a_sparse_year_is_never_filed_by_the_minute(opened: Opened) -> None:
    random = Random(7)
    schedule = opened.open(expand_above_messages=20)
    waiting = {f"m{number:04}": NOW_MS + DAY_MS + random.randrange(365 * DAY_MS) for number in range(2_000)}
    put(schedule, NOW_MS, *(timed(one, due_ms) for one, due_ms in waiting.items()))
    flush(schedule, NOW_MS)
    came: list[str] = []
    segments: set[str] = set()

    for day in range(1, 367):
        came += drain(schedule, NOW_MS + day * DAY_MS)
        settle(schedule, NOW_MS + day * DAY_MS)
        segments.update(info.name for info in opened.segments.list())

    assert came == sorted(waiting, key=lambda one: waiting[one])
    levels = Counter(name.split("-")[0] for name in segments)
    assert levels["l1d"] > 200, "weeks of 38 messages are re-filed"
    assert levels["l0m"] == 0, "and the hours of these are not"
