"""A clock that runs and can be put forward."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from outbox.testing import AdvancingClock
from outbox_core import ManualClock

WAIT_SECONDS = 300


def test_it_is_its_base_plus_what_it_was_put_forward_by(clock: ManualClock) -> None:
    ahead = AdvancingClock(clock)
    started_ms = ahead.now_ms()

    ahead.advance(timedelta(days=730, milliseconds=5))
    ahead.advance(7)
    clock.advance(100)

    assert ahead.now_ms() - started_ms == 730 * 86_400_000 + 112
    assert ahead.monotonic_ms() == 730 * 86_400_000 + 112


def test_it_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="forward"):
        AdvancingClock().advance(-1)


def test_all_who_wait_on_one_condition_are_woken_and_told_that_their_time_is_over() -> None:
    clock, condition = AdvancingClock(), threading.Condition()
    in_time: list[bool] = []

    def wait() -> None:
        with condition:
            while clock.wait(condition, 3_600_000):
                pass
            in_time.append(False)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(in_time) < 3:
        clock.advance(timedelta(hours=1))
    for thread in threads:
        thread.join(WAIT_SECONDS)

    assert in_time == [False] * 3


def test_a_notification_ends_a_wait_in_time() -> None:
    clock, condition = AdvancingClock(), threading.Condition()
    result: list[bool] = []

    def wait() -> None:
        with condition:
            result.append(clock.wait(condition, 3_600_000))

    thread = threading.Thread(target=wait)
    thread.start()
    while not result:
        with condition:
            condition.notify_all()
    thread.join(WAIT_SECONDS)

    assert result == [True]
