"""The circuit breaker: open claims nothing, half open lets one small batch through, closing keeps to its ramp."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compensator.admission.circuit_breaker import (
    OUT_WITHOUT_PROBE_MS,
    BatchOutcome,
    Breaker,
    BreakerOptions,
    BreakerState,
    Permit,
)
from outbox_core import ManualClock
from outbox_core.common.backoff import Backoff

EXACT = BreakerOptions(
    backoff=Backoff(initial_ms=1_000, max_ms=8_000, jitter=0),
    probe_rows=5,
    drain_rows_per_second=100,
    drain_step_ms=1_000,
    drain_steps=3,
)


class Guarded:
    """A breaker and its clock."""

    def __init__(self, options: BreakerOptions = EXACT, *, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.breaker = Breaker(options, random=Random(seed))

    def permit(self, rows: int = 200) -> Permit | None:
        return self.breaker.permit(rows, now_ms=self.clock.monotonic_ms())

    def must(self, rows: int = 200) -> Permit:
        permit = self.permit(rows)
        assert permit is not None
        return permit

    def settle(
        self, permit: Permit, answer: BatchOutcome, *, claimed: int | None = None, retry_after_ms: int = 0
    ) -> None:
        now_ms, rows = self.clock.monotonic_ms(), permit.rows if claimed is None else claimed
        self.breaker.settle(permit, answer, now_ms=now_ms, claimed=rows, retry_after_ms=retry_after_ms)

    def wait_ms(self, rows: int = 200) -> int:
        return self.breaker.wait_ms(rows, now_ms=self.clock.monotonic_ms())

    def is_out(self) -> bool:
        return self.breaker.is_out(now_ms=self.clock.monotonic_ms())

    def open(self) -> None:
        self.settle(self.must(), BatchOutcome.OUTAGE)


def test_closed_lets_everybody_through() -> None:
    it = Guarded()

    assert [it.must(200).rows for _ in range(3)] == [200, 200, 200]
    assert it.wait_ms() == 0


def test_an_outage_opens_it_for_all_until_its_wait_is_over() -> None:
    it = Guarded()
    it.open()

    refused = []
    while it.clock.monotonic_ms() < 1_000:
        refused.append(it.permit())
        it.clock.advance(100)

    assert refused == [None] * 10
    assert it.must().rows == 5


def test_half_open_lets_one_small_batch_through_and_no_second_one() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)

    first, second = it.permit(200), it.permit(200)

    assert first is not None
    assert (first.rows, second, it.breaker.state) == (5, None, BreakerState.HALF_OPEN)


def test_each_failed_probe_waits_longer_up_to_the_bound() -> None:
    it = Guarded()
    it.open()
    waits = []

    for _ in range(6):
        waits.append(it.wait_ms())
        it.clock.advance(it.wait_ms())
        it.settle(it.must(), BatchOutcome.OUTAGE)

    assert waits == [1_000, 2_000, 4_000, 8_000, 8_000, 8_000]


def test_the_broker_may_ask_for_a_longer_pause() -> None:
    it = Guarded()

    it.settle(it.must(), BatchOutcome.OUTAGE, retry_after_ms=30_000)

    assert it.wait_ms() == 30_000


def test_a_probe_that_found_no_row_leaves_the_place_to_another_source_at_once() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)

    it.settle(it.must(), BatchOutcome.UNKNOWN, claimed=0)

    assert it.breaker.state is BreakerState.OPEN
    assert it.must().rows == 5


def test_a_broker_is_out_while_probes_of_it_fail_however_long_that_lasts() -> None:
    it = Guarded()
    before = it.is_out()
    it.open()
    seen = []

    for _ in range(100):
        seen.append(it.is_out())
        it.clock.advance(it.wait_ms())
        seen.append(it.is_out())
        probe = it.must()
        it.clock.advance(EXACT.probe_ms_max)
        seen.append(it.is_out())
        it.settle(probe, BatchOutcome.OUTAGE)

    assert not before
    assert set(seen) == {True}


def test_a_broker_for_which_nothing_is_due_any_more_is_not_known_to_be_out() -> None:
    it = Guarded()
    it.open()

    it.clock.advance(1_000 + OUT_WITHOUT_PROBE_MS - 1)
    before = it.is_out()
    it.clock.advance(1)

    assert (before, it.is_out()) == (True, False)
    assert it.must().rows == EXACT.probe_rows, "the next row that is due is a probe as before"


def test_a_probe_whose_owner_vanished_is_made_up_for_by_another() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)
    lost = it.must()

    it.clock.advance(EXACT.probe_ms_max - 1)
    early = it.permit()
    it.clock.advance(1)
    late = it.permit()
    it.settle(lost, BatchOutcome.TAKEN)

    assert early is None
    assert late is not None
    assert it.breaker.state is BreakerState.HALF_OPEN, "the vanished one's answer is not about now"


def test_closing_keeps_to_the_stated_rate_and_doubles_it_step_by_step() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)
    it.settle(it.must(), BatchOutcome.TAKEN)
    drained = [0] * 4
    began_ms = it.clock.monotonic_ms()

    while (second := (it.clock.monotonic_ms() - began_ms) // 1_000) < 4:
        if permit := it.permit(200):
            drained[second] += permit.rows
            it.settle(permit, BatchOutcome.TAKEN)
        it.clock.advance(10)

    assert 95 <= drained[0] <= 110
    assert 190 <= drained[1] <= 220
    assert 380 <= drained[2] <= 440
    assert drained[3] == 100 * 200
    assert it.breaker.state is BreakerState.CLOSED


def test_rows_that_were_not_there_use_up_nothing_of_the_ramp() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)
    it.settle(it.must(), BatchOutcome.TAKEN)

    first = it.must()
    it.settle(first, BatchOutcome.UNKNOWN, claimed=0)

    assert it.must().rows == first.rows
    assert it.breaker.state is BreakerState.CLOSING


def test_an_outage_while_closing_opens_it_with_a_longer_wait() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)
    it.settle(it.must(), BatchOutcome.TAKEN)

    it.settle(it.must(), BatchOutcome.OUTAGE)

    assert it.breaker.state is BreakerState.OPEN
    assert it.wait_ms() == 2_000


def test_after_a_whole_ramp_the_next_outage_waits_as_the_first_did() -> None:
    it = Guarded()
    it.open()
    it.clock.advance(1_000)
    it.settle(it.must(), BatchOutcome.TAKEN)
    it.clock.advance(3_000)

    it.open()

    assert it.wait_ms() == 1_000


@pytest.mark.parametrize("late", [BatchOutcome.TAKEN, BatchOutcome.OUTAGE])
def test_answers_to_batches_from_before_the_outage_change_nothing(late: BatchOutcome) -> None:
    it = Guarded()
    before = it.must()
    it.open()
    wait_ms = it.wait_ms()

    it.settle(before, late)

    assert (it.breaker.state, it.wait_ms()) == (BreakerState.OPEN, wait_ms)


@given(seed=st.integers(0, 2**32))
def test_breakers_that_opened_together_do_not_probe_together(seed: int) -> None:
    options = BreakerOptions(backoff=Backoff(initial_ms=10_000, max_ms=10_000, jitter=0.25))
    them = [Guarded(options, seed=seed + number) for number in range(8)]
    for it in them:
        it.open()

    waits = {it.wait_ms() for it in them}

    assert len(waits) > 1
    assert all(7_500 <= wait_ms <= 10_000 for wait_ms in waits)


class BreakerMachine(RuleBasedStateMachine):
    """Any order of permits, answers and time."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Guarded()
        self.out: list[Permit] = []

    @rule(rows=st.integers(1, 300))
    def ask(self, rows: int) -> None:
        before, wait_ms = self.it.breaker.state, self.it.wait_ms(rows)
        permit = self.it.permit(rows)
        if permit is None:
            # Told to wait, and for longer than nothing: nobody spins.
            assert self.it.wait_ms(rows) > 0
            return
        assert wait_ms == 0
        assert 1 <= permit.rows <= rows
        if before in {BreakerState.OPEN, BreakerState.HALF_OPEN}:
            assert permit.rows <= EXACT.probe_rows
            assert self.it.breaker.state is BreakerState.HALF_OPEN
        self.out.append(permit)

    @rule(answer=st.sampled_from(BatchOutcome), newest=st.booleans())
    def answer(self, answer: BatchOutcome, newest: bool) -> None:
        if self.out:
            permit = self.out.pop(-1 if newest else 0)
            self.it.settle(permit, answer, claimed=0 if answer is BatchOutcome.UNKNOWN else permit.rows)

    @rule(ms=st.integers(0, 70_000))
    def pass_time(self, ms: int) -> None:
        self.it.clock.advance(ms)

    @invariant()
    def never_shut_for_good(self) -> None:
        assert self.it.wait_ms() <= max(EXACT.probe_ms_max, EXACT.backoff.max_ms)


TestBreakerMachine = BreakerMachine.TestCase
