"""Lines that would come with each batch: once a minute for each key, within bounds, from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from outbox_core.common.clock import ManualClock
from outbox_core.runtime.log_interval import LOG_AGAIN_MS, LOG_KEYS_MAX, LogInterval


def test_a_key_is_logged_once_a_minute_and_tells_how_often_it_was_left_out(clock: ManualClock) -> None:
    interval = LogInterval(clock)

    assert [interval.passed_over(key) for key in ("a", "a", ("a", 1), "a")] == [0, None, 0, None]
    clock.advance(LOG_AGAIN_MS - 1)
    assert not interval.is_time("a")
    clock.advance(1)
    assert [interval.passed_over(key) for key in ("a", "a", ("a", 1))] == [3, None, 0]


def test_beyond_the_limit_the_key_whose_line_is_the_oldest_is_forgotten(clock: ManualClock) -> None:
    interval = LogInterval(clock)
    for number in range(LOG_KEYS_MAX):
        interval.is_time(number)
    interval.is_time(0)  # left out: it stays the oldest

    assert interval.is_time("one more")

    assert [interval.is_time(key) for key in (1, "one more", 0)] == [False, False, True]


def test_threads_that_push_each_others_keys_out_meet_no_error(clock: ManualClock) -> None:
    interval = LogInterval(clock)

    def log(first: int) -> int:
        return sum(interval.is_time(first + number) for number in range(2 * LOG_KEYS_MAX))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(log, range(0, 8 * LOG_KEYS_MAX, 2 * LOG_KEYS_MAX))) == 8 * LOG_KEYS_MAX
