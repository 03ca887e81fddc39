"""The token bucket: never more than it states, never stuck, nothing taken where another limit refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compensator.admission.rate_limiter import RateLimiter, RateOptions, take_of_all, wait_for_all
from outbox_core import ManualClock

STEPS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5_000)), min_size=1, max_size=60)


@given(rate=st.floats(0.1, 5_000), steps=STEPS)
def test_no_span_of_time_sees_more_rows_than_the_burst_and_the_rate_allow(
    rate: float, steps: list[tuple[int, int]]
) -> None:
    options = RateOptions(rows_per_second=rate)
    limit, now_ms = RateLimiter(options, now_ms=0), 0
    taken: list[tuple[int, int]] = []

    for rows_max, pause_ms in steps:
        now_ms += pause_ms
        taken.append((now_ms, limit.take(rows_max, now_ms=now_ms)))

    for first in range(len(taken)):
        for last in range(first, len(taken)):
            span_ms = taken[last][0] - taken[first][0]
            rows = sum(rows for _, rows in taken[first : last + 1])
            assert rows <= options.burst_rows + rate * span_ms / 1_000 + 1e-6


@given(rate=st.floats(0.1, 5_000), rows_max=st.integers(1, 1_000), used=st.integers(0, 10_000))
def test_who_waits_as_long_as_told_gets_something(rate: float, rows_max: int, used: int) -> None:
    limit = RateLimiter(RateOptions(rows_per_second=rate), now_ms=0)
    if used:
        limit.take(used, now_ms=0)

    wait_ms = limit.wait_ms(rows_max, now_ms=0)

    assert limit.take(rows_max, now_ms=wait_ms) >= 1


def test_a_limit_of_a_hundred_rows_a_second_gives_a_thousand_in_nine_seconds_after_its_burst(
    clock: ManualClock,
) -> None:
    limit = RateLimiter(RateOptions(rows_per_second=100), now_ms=clock.monotonic_ms())
    taken = limit.take(200, now_ms=clock.monotonic_ms())

    while taken < 1_000:
        clock.advance(limit.wait_ms(200, now_ms=clock.monotonic_ms()))
        taken += limit.take(200, now_ms=clock.monotonic_ms())

    assert 9_000 <= clock.monotonic_ms() <= 9_300


def test_a_low_rate_gives_whole_rows_and_not_one_claim_for_each_of_many(clock: ManualClock) -> None:
    limit = RateLimiter(RateOptions(rows_per_second=40), now_ms=0)
    limit.take(40, now_ms=0)
    batches = []

    for _ in range(100):
        clock.advance(10)
        if rows := limit.take(200, now_ms=clock.monotonic_ms()):
            batches.append(rows)

    assert batches == [10, 10, 10, 10]


def test_rows_that_were_not_claimed_may_be_taken_again() -> None:
    limit = RateLimiter(RateOptions(rows_per_second=10), now_ms=0)
    limit.take(10, now_ms=0)

    limit.give_back(7)

    assert limit.take(200, now_ms=0) == 7


def test_the_tightest_of_several_limits_counts_and_the_others_keep_what_it_refused() -> None:
    wide, tight = (RateLimiter(RateOptions(rows_per_second=rate), now_ms=0) for rate in (1_000, 30))

    first, second = (take_of_all([wide, tight], 200, now_ms=0) for _ in range(2))

    assert (first, second) == (30, 0)
    assert wide.take(2_000, now_ms=0) == 970
    assert wait_for_all([wide, tight], 200, now_ms=0) > 0
    assert (take_of_all([], 200, now_ms=0), wait_for_all([], 200, now_ms=0)) == (200, 0)


@pytest.mark.parametrize(("rate", "burst_ms"), [(0, 1_000), (-1, 1_000), (1, 0)])
def test_a_limit_that_could_never_give_anything_is_refused(rate: float, burst_ms: int) -> None:
    with pytest.raises(ValueError, match="more than 0 rows"):
        RateOptions(rows_per_second=rate, burst_ms=burst_ms)
