"""The arithmetic of levels: where a due time goes, when its bucket moves on, and how many buckets there are."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.schedule.levels import BUCKETS_MAX, FINEST, LEVELS, BucketId, is_to_expand, is_to_fire, place
from outbox_core.messages.limits import DELAY_MAX_MS

NOW_MS = 1_800_000_000_000
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


def always(_: BucketId) -> bool:
    return True


@pytest.mark.parametrize(
    ("ahead_ms", "level"),
    [
        (-DAY_MS, "L0m"),
        (0, "L0m"),
        (2 * HOUR_MS - 1, "L0m"),
        (2 * HOUR_MS, "L1h"),
        (2 * DAY_MS - 1, "L1h"),
        (2 * DAY_MS, "L1d"),
        (14 * DAY_MS - 1, "L1d"),
        (14 * DAY_MS, "L1w"),
        (731 * DAY_MS, "L1w"),
    ],
)
def test_a_message_goes_to_the_coarsest_level_whose_barrier_it_clears(ahead_ms: int, level: str) -> None:
    bucket = place(NOW_MS + ahead_ms, now_ms=NOW_MS, is_open=always)

    assert LEVELS[bucket.level].name == level
    assert bucket.start_ms <= NOW_MS + ahead_ms < bucket.end_ms


def test_a_sealed_bucket_sends_a_message_to_the_next_finer_level() -> None:
    due_ms = NOW_MS + 20 * DAY_MS

    bucket = place(due_ms, now_ms=NOW_MS, is_open=lambda one: one.level != 0)

    assert bucket == BucketId(1, due_ms // DAY_MS)


@given(due_ms=st.integers(0, 4 * NOW_MS), now_ms=st.integers(0, 4 * NOW_MS), below=st.integers(-1, FINEST - 1))
def test_a_message_that_is_refiled_goes_to_a_finer_level_and_so_at_most_four_times_anywhere(
    due_ms: int, now_ms: int, below: int
) -> None:
    bucket = place(due_ms, now_ms=now_ms, is_open=always, below=below)

    assert bucket.level > below
    assert bucket.start_ms <= due_ms < bucket.end_ms


@given(now_ms=st.integers(0, 4 * NOW_MS), ahead_ms=st.integers(0, DELAY_MAX_MS))
def test_direct_writes_to_a_bucket_end_before_it_is_to_be_expanded(now_ms: int, ahead_ms: int) -> None:
    bucket = place(now_ms + ahead_ms, now_ms=now_ms, is_open=always)

    assert bucket.level == FINEST or not (is_to_expand(bucket, now_ms=now_ms) or is_to_fire(bucket, now_ms=now_ms))


def test_a_bucket_is_expanded_from_one_length_before_it_begins_until_it_begins() -> None:
    day = BucketId(1, NOW_MS // DAY_MS)

    assert not is_to_expand(day, now_ms=day.start_ms - DAY_MS - 1)
    assert is_to_expand(day, now_ms=day.start_ms - DAY_MS)
    assert is_to_expand(day, now_ms=day.start_ms - 1)
    assert not is_to_expand(day, now_ms=day.start_ms)
    assert is_to_fire(day, now_ms=day.start_ms)


def test_a_minute_is_never_expanded() -> None:
    minute = BucketId(FINEST, NOW_MS // MINUTE_MS)

    assert not is_to_expand(minute, now_ms=minute.start_ms - MINUTE_MS)


def test_due_times_over_two_years_take_no_more_buckets_than_the_table_says(random_seed: int) -> None:
    random = Random(random_seed)
    horizons = [DELAY_MAX_MS - DAY_MS, 20 * DAY_MS, 3 * DAY_MS, 3 * HOUR_MS]

    for _ in range(5):
        now_ms = NOW_MS + random.randrange(1000 * DAY_MS)
        buckets = {
            place(now_ms + ahead_ms, now_ms=now_ms, is_open=always)
            for horizon_ms in horizons
            for ahead_ms in range(0, horizon_ms, max(30_000, horizon_ms // 20_000))
        }
        assert 270 <= len(buckets) <= BUCKETS_MAX
