"""A group's decisions, without disk or threads: time is an argument."""

from __future__ import annotations

import pytest

from outbox_broker.group.consumer_group import Death, DeathCause, DeliveryRun, Group, Requeue
from outbox_broker.group.in_flight import InFlightRun
from outbox_broker.group.receipt import Receipt
from outbox_broker.log.topic_index import DAMAGED
from outbox_core.messages.message import AckStatus, GroupConfig


def group_of(*, max_attempts: int = 3) -> Group:
    config = GroupConfig(max_attempts=max_attempts, backoff_initial_ms=100, backoff_max_ms=1_000)
    return Group(name="g", config=config, position=0)


def deliver(group: Group, *sequences: int, visible_at_ms: int) -> list[DeliveryRun]:
    handed = group.decide_delivery([(sequence, sequence + 1) for sequence in sequences])
    together = sum(run.count for run in handed)
    for run in handed:
        group.deliver(
            run.first, run.count, delivery=run.delivery, attempt=run.attempt, visible_at_ms=visible_at_ms,
            together=together, expiry_counts=together == 1,
        )  # fmt: skip
    return handed


def ready(group: Group, now_ms: int) -> list[int]:
    runs, _ = group.visible_again(now_ms=now_ms, count_max=100)
    return [sequence for first, end in runs for sequence in range(first, end)]


def held(group: Group, sequence: int) -> InFlightRun:
    found = group.unsettled.find(sequence)
    assert found is not None
    return found


def test_a_first_hand_out_is_delivery_and_attempt_one() -> None:
    group = group_of()

    assert deliver(group, 0, 1, visible_at_ms=10) == [
        DeliveryRun(0, 1, 1, 1, 0), DeliveryRun(1, 1, 1, 1, 0)
    ]  # fmt: skip

    assert (group.position, group.in_flight()) == (2, 2)


def test_a_message_is_visible_again_at_its_time_and_not_a_millisecond_before() -> None:
    group = group_of()
    deliver(group, 0, visible_at_ms=1_000)

    assert ready(group, 999) == []
    assert ready(group, 1_000) == [0]


def test_looking_for_what_is_visible_changes_nothing() -> None:
    group = group_of()
    deliver(group, 0, 1, visible_at_ms=10)

    assert [ready(group, 10) for _ in range(3)] == [[0, 1]] * 3


def test_what_is_visible_again_comes_in_order_of_time_then_of_sequence() -> None:
    group = group_of()
    deliver(group, 0, visible_at_ms=30)
    deliver(group, 2, 3, visible_at_ms=20)
    deliver(group, 1, visible_at_ms=20)

    assert ready(group, 30) == [1, 2, 3, 0]
    assert group.next_visible_ms() == 20


def test_a_settled_message_leaves_no_place_in_the_order() -> None:
    group = group_of()
    deliver(group, 0, 1, visible_at_ms=10)

    group.ack(0)

    assert ready(group, 10) == [1]
    group.ack(1)
    assert group.next_visible_ms() is None


def test_a_message_that_is_moved_to_the_same_time_twice_comes_once() -> None:
    group = group_of(max_attempts=2)
    deliver(group, 0, visible_at_ms=1_000)
    group.requeue(Requeue(0, 1, 0, 0), reason=None)
    deliver(group, 0, visible_at_ms=1_000)
    group.extend(0, visible_at_ms=1_000)

    assert ready(group, 1_000) == [0]
    deliver(group, 0, visible_at_ms=2_000)
    group.extend(0, visible_at_ms=2_000)
    assert [one.first for one in group.visible_again(now_ms=2_000, count_max=5)[1]] == [0]


def test_an_extension_moves_the_time_either_way() -> None:
    group = group_of()
    deliver(group, 0, visible_at_ms=100)

    group.extend(0, visible_at_ms=500)
    assert (ready(group, 499), ready(group, 500)) == ([], [0])

    group.extend(0, visible_at_ms=50)
    assert ready(group, 50) == [0]


def test_an_expired_hand_out_uses_an_attempt_once() -> None:
    group = group_of()
    deliver(group, 0, visible_at_ms=10)

    [second] = deliver(group, 0, visible_at_ms=20)

    assert second == DeliveryRun(0, 1, 2, 2, 0, again=True, expired=True)
    assert held(group, 0).attempts_used == 1


def test_expiry_after_the_last_attempt_is_a_death_and_says_so() -> None:
    group = group_of(max_attempts=1)
    deliver(group, 0, visible_at_ms=10)

    sequences, [death] = group.visible_again(now_ms=10, count_max=5)

    assert sequences == []
    assert (death.first, death.count, death.attempts) == (0, 1, 1)
    assert "invisible time" in death.reason


def test_the_reason_of_the_last_nack_is_kept_for_a_death_by_expiry() -> None:
    group = group_of(max_attempts=2)
    deliver(group, 0, visible_at_ms=10)
    group.requeue(Requeue(0, 1, 20, 1), reason="no stock")
    deliver(group, 0, visible_at_ms=30)

    _, [death] = group.visible_again(now_ms=30, count_max=5)

    assert (death.reason, death.attempts) == ("no stock", 2)


@pytest.mark.parametrize(("failures", "delay_ms"), [(1, 100), (2, 200), (4, 800), (5, 1_000), (900, 1_000)])
def test_a_nack_without_delay_backs_off_exponentially_up_to_the_cap(failures: int, delay_ms: int) -> None:
    group = group_of(max_attempts=1_000)
    deliver(group, 0, visible_at_ms=10)
    held(group, 0).attempts_used = failures - 1

    decision = group.decide_nack(0, now_ms=5, delay_ms=None, reason=None, counts=True)

    assert decision == Requeue(0, 1, 5 + delay_ms, failures)


def test_a_nack_that_counts_dies_at_the_last_attempt_and_one_that_does_not_never_dies() -> None:
    group = group_of(max_attempts=1)
    deliver(group, 0, visible_at_ms=10)

    assert group.decide_nack(0, now_ms=5, delay_ms=0, reason="bad", counts=True) == Death(
        0, 1, 1, "bad", DeathCause.REJECTED
    )
    assert group.decide_nack(0, now_ms=5, delay_ms=None, reason="bad", counts=False) == Requeue(0, 1, 5, 0)


def test_acknowledgements_are_told_apart() -> None:
    group = group_of()
    deliver(group, 0, 1, 2, visible_at_ms=10)
    group.ack(0)
    deliver(group, 1, visible_at_ms=20)
    group.die(Death(2, 1, 3, "bad"), at_ms=5)

    def status(sequence: int, delivery: int = 1, generation: int = 0) -> AckStatus:
        return group.ack_status(sequence, delivery=delivery, generation=generation)

    assert status(0) is AckStatus.ALREADY_ACKED
    assert (status(1, 1), status(1, 2), status(1, 3)) == (AckStatus.STALE, AckStatus.ACKED, AckStatus.STALE)
    assert status(1, 2, generation=1) is AckStatus.STALE
    assert status(2) is AckStatus.STALE
    assert status(3) is AckStatus.UNKNOWN


def test_a_nacked_delivery_may_still_be_acknowledged_but_not_nacked_again() -> None:
    group = group_of()
    deliver(group, 0, visible_at_ms=10)
    group.requeue(Requeue(0, 1, 100, 1), reason=None)

    assert group.ack_status(0, delivery=1, generation=0) is AckStatus.ACKED
    assert group.in_flight_of(0, 1, delivery=1, generation=0) == []


def test_a_redrive_begins_a_new_life_and_is_idempotent() -> None:
    group = group_of()
    deliver(group, 0, 1, visible_at_ms=10)
    group.die(Death(0, 1, 3, "bad"), at_ms=5)

    assert group.redrive([(0, 2), (7, 8)], now_ms=50) == 1
    assert group.redrive([(0, 1)], now_ms=50) == 0

    assert ready(group, 50) == [1, 0]
    assert deliver(group, 0, visible_at_ms=60) == [DeliveryRun(0, 1, 1, 1, 1)]
    assert group.ack_status(0, delivery=1, generation=0) is AckStatus.STALE
    assert group.ack_status(1, delivery=1, generation=0) is AckStatus.ACKED, "who did not die lives on"


def test_what_was_acknowledged_before_a_redrive_of_others_is_still_acknowledged() -> None:
    group = group_of()
    deliver(group, 0, 1, visible_at_ms=10)
    group.ack(0)
    group.die(Death(1, 1, 3, "bad"), at_ms=5)

    group.redrive([(1, 2)], now_ms=50)

    assert group.ack_status(0, delivery=1, generation=0) is AckStatus.ALREADY_ACKED


@pytest.mark.parametrize("position", [0, 1, 3], ids=["back", "into the middle", "ahead"])
def test_after_a_seek_every_old_receipt_is_stale(position: int) -> None:
    group = group_of()
    deliver(group, 0, 1, 2, visible_at_ms=10)
    group.ack(1)

    group.seek(position, generation=1)

    assert [group.ack_status(sequence, delivery=1, generation=0) for sequence in range(3)] == [AckStatus.STALE] * 3
    assert len(group.unsettled) == 0
    assert group.position == position


def test_a_seek_back_takes_dead_letters_ahead_of_it_along() -> None:
    group = group_of()
    deliver(group, 0, 1, visible_at_ms=10)
    for sequence in (0, 1):
        group.die(Death(sequence, 1, 3, "bad"), at_ms=5)

    group.seek(1, generation=1)

    assert [(one.first, one.end) for one in group.dead] == [(0, 1)]


def test_what_is_not_moved_is_held_although_what_is_behind_it_was() -> None:
    """As where the action is lost that settled it, and it is open again."""
    group = group_of()
    deliver(group, 0, 1, 2, visible_at_ms=10)
    group.move_aside([(0, 500, 20, 7), (2, 520, 20, 7)], moved_to=3)

    assert (group.oldest(), group.moved_to) == (0, 0)
    assert list(group.open_in_topic(0, 3)) == [(1, 2)]

    group.ack(1)
    group.move_aside([], moved_to=3)

    assert (group.oldest(), group.moved_to, [place.offset for _, place in group.aside.before(510)]) == (3, 3, [500])


def test_nothing_is_moved_from_where_a_group_has_not_come_yet() -> None:
    """As where a kill takes a position back that no action has: what a filter passed over."""
    group = group_of()
    deliver(group, 0, visible_at_ms=10)
    group.move_aside([(0, 500, 20, 7), (5, 520, 20, 7)], moved_to=9)

    assert (group.moved_to, set(group.aside.sequences)) == (1, {0})

    deliver(group, 1, visible_at_ms=10)
    group.ack(0)

    assert (group.oldest(), len(group.aside)) == (1, 0)


def test_a_copy_that_a_power_failure_took_is_forgotten_and_what_it_was_copied_from_is_held_again() -> None:
    group = group_of()
    deliver(group, 0, 1, 2, visible_at_ms=10)
    group.move_aside([(0, 500, 20, 7), (1, 520, 20, 7), (2, DAMAGED, 0, 7)], moved_to=3)

    group.forget_aside_behind(520)

    assert (set(group.aside.sequences), group.moved_to, group.oldest()) == ({0, 2}, 1, 1)


def test_places_are_in_the_order_of_their_offsets_however_they_come() -> None:
    group = group_of()
    deliver(group, 0, 1, 2, visible_at_ms=10)
    group.move_aside([(2, 900, 20, 7)], moved_to=0)
    group.move_aside([(1, 500, 20, 7)], moved_to=0)
    group.move_aside([(0, 700, 20, 7)], moved_to=3)

    assert [place.offset for _, place in group.aside.before(900)] == [500, 700]
    assert [one for one, _ in group.aside.before(900)] == [1, 0]
    assert group.drop_before(3, offset=800) == 2
    assert set(group.aside.sequences) == {2}


@pytest.mark.parametrize(
    "text",
    ["", "t/g", "t/g/1", "t/g/1.1", "t/g/1.1.1.1", "t/g/-1.1.0", "t/g/1.1.0 ", "t/g/1.1.0\n", "t//1.1.0", "t/g/x.1.0",
     "t/g/\u0661.1.0", "é/g/1.1.0", "t/g/1" + "0" * 30 + ".1.0", "/" * 1000],
)  # fmt: skip
def test_what_is_not_a_receipt_is_not_parsed(text: str) -> None:
    assert Receipt.parse(text) is None


def test_a_receipt_is_written_and_parsed_alike() -> None:
    receipt = Receipt("flights.v1", "billing-2", 123_456_789, 3, 1)

    assert Receipt.parse(str(receipt)) == receipt
