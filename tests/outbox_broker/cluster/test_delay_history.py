"""The checker of histories finds each kind of violation, and none in a history that is right."""

from __future__ import annotations

from tests.outbox_broker.cluster.delay_history import Arrival, DelayHistory, Fate, verdict_on

DUE_MS = 1_000


def history(*ids: str) -> DelayHistory:
    """A history in which these messages were published and acknowledged."""
    one = DelayHistory()
    one.publishing(dict.fromkeys(ids, DUE_MS))
    one.published(ids)
    return one


def cancel(one: DelayHistory, message_id: str, *, is_canceled: bool) -> None:
    one.canceling([message_id])
    one.cancel_answered(message_id, is_canceled=is_canceled)


def test_every_acknowledged_message_has_one_fate_and_they_add_up() -> None:
    one = history("delivered", "canceled", "pending", "quarantined", "too-late")
    cancel(one, "canceled", is_canceled=True)
    cancel(one, "too-late", is_canceled=False)
    one.arrived([Arrival("delivered", DUE_MS), Arrival("too-late", DUE_MS + 5)])
    one.pending.add("pending")
    one.quarantined.add("quarantined")

    verdict = verdict_on(one)

    assert verdict.violations == ()
    assert verdict.acknowledged == sum(verdict.fates.values()) == 5
    assert verdict.fates == {Fate.DELIVERED: 2, Fate.CANCELED: 1, Fate.PENDING: 1, Fate.QUARANTINED: 1}


def test_a_lost_message_is_named() -> None:
    assert verdict_on(history("a")).violations == ("1 acknowledged and lost: a",)


def test_a_message_that_comes_before_its_time_is_named_with_how_early() -> None:
    one = history("a")
    one.arrived([Arrival("a", DUE_MS - 3)])

    assert verdict_on(one).violations == ("1 early: a (3 ms)",)


def test_an_early_repetition_is_a_violation_too() -> None:
    one = history("a")
    one.arrived([Arrival("a", DUE_MS), Arrival("a", DUE_MS - 1)])

    assert verdict_on(one).violations == ("1 early: a (1 ms)",)


def test_a_repetition_is_counted_and_is_no_violation() -> None:
    one = history("a", "b")
    one.arrived([Arrival("a", DUE_MS), Arrival("a", DUE_MS + 9), Arrival("b", DUE_MS), Arrival("a", DUE_MS + 10)])

    verdict = verdict_on(one)

    assert (verdict.repeated, verdict.violations) == (2, ())


def test_a_message_that_was_answered_as_canceled_and_comes_is_a_violation() -> None:
    one = history("a")
    cancel(one, "a", is_canceled=True)
    one.arrived([Arrival("a", DUE_MS)])

    assert verdict_on(one).violations == ("1 with more than one fate: a (delivered and canceled)",)


def test_a_message_that_came_and_is_still_pending_is_a_violation() -> None:
    one = history("a")
    one.arrived([Arrival("a", DUE_MS)])
    one.pending.add("a")

    assert verdict_on(one).violations == ("1 with more than one fate: a (delivered and pending)",)


def test_a_message_that_nobody_published_is_a_violation() -> None:
    one = history("a")
    one.arrived([Arrival("a", DUE_MS), Arrival("phantom", DUE_MS)])

    assert verdict_on(one).violations == ("1 delivered and never published: phantom",)


def test_a_publish_without_an_answer_may_be_delivered_or_not_and_never_early() -> None:
    one = history()
    one.publishing({"a": DUE_MS, "b": DUE_MS})
    assert verdict_on(one).violations == ()
    one.arrived([Arrival("a", DUE_MS)])
    assert (verdict_on(one).unacknowledged, verdict_on(one).violations) == (1, ())

    one.arrived([Arrival("b", DUE_MS - 1)])

    assert verdict_on(one).violations == ("1 early: b (1 ms)",)


def test_a_cancel_without_an_answer_explains_why_a_message_does_not_come_and_does_not_forbid_it() -> None:
    one = history("stays-away", "comes")
    one.canceling(["stays-away", "comes"])
    one.arrived([Arrival("comes", DUE_MS)])

    verdict = verdict_on(one)

    assert verdict.violations == ()
    assert verdict.fates[Fate.CANCELED] == verdict.fates[Fate.DELIVERED] == 1


def test_a_canceled_message_of_a_publish_in_doubt_must_not_come() -> None:
    one = history()
    one.publishing({"a": DUE_MS})
    cancel(one, "a", is_canceled=True)
    one.arrived([Arrival("a", DUE_MS)])

    assert len(verdict_on(one).violations) == 1


def test_many_violations_of_a_kind_are_one_sentence_with_a_few_names() -> None:
    ids = [f"m{number}" for number in range(9)]

    assert verdict_on(history(*ids)).violations == ("9 acknowledged and lost: m0, m1, m2, m3, m4 and 4 more",)
