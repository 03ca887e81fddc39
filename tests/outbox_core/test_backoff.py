"""Backoff: never below its start, never above its cap, spread at the cap too, and no attempt number breaks it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.common.backoff import Backoff

backoffs = st.builds(
    lambda initial_ms, more_ms, multiplier, jitter: Backoff(
        initial_ms=initial_ms, max_ms=initial_ms + more_ms, multiplier=multiplier, jitter=jitter
    ),
    st.integers(1, 10**6),
    st.integers(0, 10**9),
    st.floats(1, 100),
    st.floats(0, 1),
)


@given(backoffs, st.integers(1, 5_000) | st.just(1025))
def test_a_delay_stays_between_its_start_and_its_cap(backoff: Backoff, attempt: int) -> None:
    assert backoff.initial_ms <= backoff.delay_ms(attempt) <= backoff.max_ms


@given(backoffs, st.integers(1, 200))
def test_delays_never_shrink_from_one_attempt_to_the_next(backoff: Backoff, attempt: int) -> None:
    assert backoff.delay_ms(attempt) <= backoff.delay_ms(attempt + 1)


@given(backoffs, st.integers(1, 200), st.integers())
def test_jitter_only_shortens_and_never_by_more_than_its_part(backoff: Backoff, attempt: int, seed: int) -> None:
    whole = backoff.delay_ms(attempt)

    spread = backoff.delay_ms(attempt, Random(seed))

    assert max(1, int((1 - backoff.jitter) * whole) - 1) <= spread <= whole


def test_the_sequence_is_the_one_that_is_documented() -> None:
    backoff = Backoff(initial_ms=1_000, multiplier=2.0, max_ms=10_000)

    assert [backoff.delay_ms(attempt) for attempt in range(1, 7)] == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


def test_no_attempt_number_overflows_or_takes_for_ever() -> None:
    for multiplier in (1.0, 1.000001, 2.0, 1e300):
        backoff = Backoff(initial_ms=1, multiplier=multiplier, max_ms=1_000)
        for attempt in (-1, 0, 1, 1_025, 100_000):
            assert 1 <= backoff.delay_ms(attempt) <= 1_000


def test_rows_that_failed_together_come_back_apart_at_the_cap_too() -> None:
    random = Random(7)

    delays = {Backoff().delay_ms(10_000, random) for _ in range(100)}

    assert len(delays) > 90


@pytest.mark.parametrize(
    "settings",
    [{"initial_ms": 0}, {"initial_ms": 10, "max_ms": 9}, {"multiplier": 0.9}, {"jitter": -0.1}, {"jitter": 1.1}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="backoff needs"):
        Backoff(**settings)  # type: ignore[arg-type]
