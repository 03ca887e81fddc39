"""Who has the next turn, and when: at once, ever more seldom, or when the next row falls due. Nobody is passed over."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compensator.work.source_schedule import (
    SOON_JITTER_MS,
    DatabaseFailure,
    HeldBack,
    MoreRowsDue,
    NoRowsDue,
    Outcome,
    PacingOptions,
    SourcePace,
    TurnQueue,
    decide,
)
from outbox_core import ManualClock
from outbox_core.common.backoff import Backoff

EXACT = PacingOptions(jitter=0, failure=Backoff(initial_ms=1_000, max_ms=60_000, jitter=0))
OUTCOMES = st.one_of(
    st.just(MoreRowsDue()),
    st.builds(NoRowsDue, st.booleans(), st.one_of(st.none(), st.integers(-5_000, 100_000))),
    st.builds(HeldBack, st.integers(-5, 100_000)),
    st.just(DatabaseFailure()),
)


def delays(outcomes: list[Outcome], options: PacingOptions = EXACT, *, seed: int = 0) -> list[int]:
    """The delay after each of these turns of one source."""
    pace, random, found = SourcePace(), Random(seed), []
    for outcome in outcomes:
        pace, delay_ms = decide(pace, outcome, options=options, random=random)
        found.append(delay_ms)
    return found


def test_more_goes_on_at_once() -> None:
    assert delays([MoreRowsDue(), MoreRowsDue()]) == [0, 0]


def test_an_idle_source_is_looked_at_ever_more_seldom_up_to_the_bound() -> None:
    assert delays([NoRowsDue(found=False)] * 6) == [1_500, 2_250, 3_375, 5_000, 5_000, 5_000]


def test_anything_found_brings_back_the_interval() -> None:
    quiet = [NoRowsDue(found=False)] * 5

    assert delays([*quiet, NoRowsDue(found=True), NoRowsDue(found=False)])[-2:] == [1_000, 1_500]
    assert delays([*quiet, MoreRowsDue(), NoRowsDue(found=False)])[-1] == 1_500


@given(next_due_ms=st.integers(-10_000, 4_900), seed=st.integers(0, 100))
def test_the_next_turn_is_not_later_than_the_next_row_falls_due(next_due_ms: int, seed: int) -> None:
    idle = [NoRowsDue(found=False)] * 10

    last = delays([*idle, NoRowsDue(found=False, next_due_ms=next_due_ms)], seed=seed)[-1]

    assert max(0, next_due_ms) < last <= max(0, next_due_ms) + 1 + SOON_JITTER_MS


@given(seed=st.integers(0, 2**32))
def test_an_idle_source_costs_at_most_a_turn_in_five_seconds_with_jitter_too(seed: int) -> None:
    waits = delays([NoRowsDue(found=False)] * 50, PacingOptions(), seed=seed)[5:]

    assert min(waits) >= 5_000
    assert max(waits) <= 6_250
    assert len(set(waits)) > 10


def test_a_failing_source_is_tried_ever_more_seldom_and_forgiven_at_its_first_success() -> None:
    failed: list[Outcome] = [DatabaseFailure()] * 8

    assert delays(failed) == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert delays([*failed, NoRowsDue(found=False), DatabaseFailure()])[-2:] == [1_500, 1_000]


def test_who_is_held_comes_back_when_told() -> None:
    assert delays([HeldBack(250), HeldBack(0)]) == [250, 1]


def test_who_is_held_for_an_hour_shows_meanwhile_that_it_is_served() -> None:
    assert delays([HeldBack(3_600_000)]) == [EXACT.idle_ms]
    assert delays([HeldBack(3_600_000)], PacingOptions(interval_ms=60_000)) == [60_000]


@given(outcomes=st.lists(OUTCOMES, max_size=40), seed=st.integers(0, 1_000))
def test_no_outcome_makes_a_source_wait_longer_than_its_bounds(outcomes: list[Outcome], seed: int) -> None:
    for outcome, delay_ms in zip(outcomes, delays(outcomes, PacingOptions(), seed=seed), strict=True):
        bound = max(1, outcome.wait_ms) if isinstance(outcome, HeldBack) else 60_000
        assert 0 <= delay_ms <= bound


# -- the queue -------------------------------------------------------------------------------------------------------


class Turns:
    """A queue and its clock."""

    def __init__(self, *sources: str, suspects_max: int = 1) -> None:
        self.clock = ManualClock()
        self.queue = TurnQueue(EXACT, suspects_max=suspects_max, random=Random(0))
        self.keep(*sources)

    @property
    def now_ms(self) -> int:
        return self.clock.monotonic_ms()

    def keep(self, *sources: str) -> None:
        self.queue.keep(sources, now_ms=self.now_ms)

    def take(self) -> str | None:
        return self.queue.take(now_ms=self.now_ms)

    def done(self, source: str, outcome: Outcome) -> None:
        self.queue.done(source, outcome, now_ms=self.now_ms)

    def wait_ms(self) -> int | None:
        return self.queue.wait_ms(now_ms=self.now_ms)


def test_sources_with_a_backlog_take_turns() -> None:
    it = Turns("a", "b", "c")
    order = []

    for _ in range(9):
        source = it.take()
        assert source is not None
        order.append(source)
        it.done(source, MoreRowsDue())

    assert order == ["a", "b", "c"] * 3


def test_a_source_has_one_worker_at_a_time() -> None:
    it = Turns("a")

    assert (it.take(), it.take(), it.wait_ms()) == ("a", None, None)


def test_an_idle_source_wakes_among_busy_ones_when_its_time_comes() -> None:
    it = Turns("idle", "busy")
    assert it.take() == "idle"
    it.done("idle", NoRowsDue(found=False))
    seen: Counter[str] = Counter()

    for _ in range(100):
        source = it.take()
        assert source is not None
        seen[source] += 1
        it.clock.advance(100)
        it.done(source, MoreRowsDue() if source == "busy" else NoRowsDue(found=False))

    assert seen["idle"] == 3
    assert seen["busy"] == 97


def test_sources_that_fail_hold_no_more_workers_than_their_share() -> None:
    it = Turns("dead-1", "dead-2", "well", suspects_max=1)
    for source in ("dead-1", "dead-2", "well"):
        assert it.take() == source
    for source in ("dead-1", "dead-2"):
        it.done(source, DatabaseFailure())
    it.done("well", MoreRowsDue())
    it.clock.advance(1_000)

    well, dead, nobody = it.take(), it.take(), it.take()

    assert (well, dead, nobody) == ("well", "dead-1", None)
    assert it.wait_ms() is None, "dead-2 waits for dead-1, and not for a time"
    it.done("dead-1", DatabaseFailure())
    assert it.take() == "dead-2"


def test_a_lost_source_has_no_more_turns_and_comes_back_when_it_is_ours_again() -> None:
    it = Turns("a", "b")
    assert it.take() == "a"

    it.keep("b")
    it.done("a", MoreRowsDue())
    without = [it.take(), it.take()]
    it.keep("a", "b")

    assert without == ["b", None]
    assert it.take() == "a"


def test_a_source_that_was_lost_and_found_during_its_turn_has_one_place() -> None:
    it = Turns("a")
    assert it.take() == "a"

    it.keep()
    it.keep("a")
    during = it.take()
    it.done("a", MoreRowsDue())

    assert during is None
    assert (it.take(), it.take()) == ("a", None)


def test_who_waits_may_be_told_to_come_now() -> None:
    it = Turns("a", "b")
    for source in ("a", "b"):
        assert it.take() == source
        it.done(source, HeldBack(60_000))

    it.queue.hasten(["b", "unknown"], now_ms=it.now_ms)

    assert (it.take(), it.take()) == ("b", None)


def test_who_waits_for_its_database_is_not_told_to_come() -> None:
    it = Turns("a", "b")
    for source, outcome in (("a", DatabaseFailure()), ("b", HeldBack(60_000))):
        assert it.take() == source
        it.done(source, outcome)

    it.queue.hasten(["a", "b"], now_ms=it.now_ms)

    assert (it.take(), it.take()) == ("b", None)


def test_a_source_whose_turn_is_in_hand_when_it_is_hastened_has_another_one_right_behind_it() -> None:
    it = Turns(suspects_max=2)
    it.keep("a")
    assert it.take() == "a"

    it.queue.hasten(["a"], now_ms=it.now_ms)
    it.done("a", HeldBack(60_000))

    assert it.take() == "a", "it was told to wait before the broker came back"
    it.done("a", HeldBack(60_000))
    assert it.take() is None


class QueueMachine(RuleBasedStateMachine):
    """Any order of joining, leaving, turns and time: never twice at once, never forgotten, never without bound."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Turns(suspects_max=2)
        self.kept: set[str] = set()
        self.taken: set[str] = set()

    @rule(sources=st.sets(st.sampled_from("abcdef")))
    def keep(self, sources: set[str]) -> None:
        self.it.keep(*sorted(sources))
        self.kept = sources

    @rule()
    def take(self) -> None:
        source = self.it.take()
        if source is None:
            wait_ms = self.it.wait_ms()
            assert wait_ms is None or wait_ms > 0, "a worker would spin"
            return
        assert source in self.kept
        assert source not in self.taken
        self.taken.add(source)

    @rule(outcome=OUTCOMES, pick=st.integers(0, 5))
    def done(self, outcome: Outcome, pick: int) -> None:
        if self.taken:
            source = sorted(self.taken)[pick % len(self.taken)]
            self.taken.remove(source)
            self.it.done(source, outcome)

    @rule(source=st.sampled_from("abcdef"))
    def hasten(self, source: str) -> None:
        self.it.queue.hasten([source], now_ms=self.it.now_ms)

    @rule(ms=st.integers(0, 100_000))
    def pass_time(self, ms: int) -> None:
        self.it.clock.advance(ms)

    @invariant()
    def everybody_has_a_turn_to_come(self) -> None:
        if self.kept - self.taken and not self.taken:
            assert self.it.wait_ms() is not None
        assert self.it.queue.busy == self.taken
        assert self.it.queue.entries <= 8 * (len(self.kept) + 8) + 1


TestQueueMachine = QueueMachine.TestCase
