"""What every broker does with acknowledgements, and with their absence."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from outbox_core import Broker, Delivery, GroupConfig, Message
from outbox_core.messages.ids import new_message_id

WAIT_MS = 60_000


def publish(broker: Broker, topic: str, count: int = 1) -> list[str]:
    batch = [Message(id=new_message_id(), topic=topic, body=b"x") for _ in range(count)]
    broker.publish(batch)
    return [one.id for one in batch]


def pull_one(
    broker: Broker, topic: str, *, invisible_ms: int = 30_000, group: str = "g", begins: bool = False
) -> Delivery:
    [delivery] = broker.pull(topic, group, max_messages=1, wait_ms=WAIT_MS, invisible_ms=invisible_ms, begins=begins)
    return delivery


def test_what_is_acknowledged_does_not_come_back(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    delivery = pull_one(broker, topic, invisible_ms=30)

    assert broker.ack([delivery.receipt]) == ["acked"]

    assert broker.pull(topic, "g", wait_ms=150) == []


def test_what_is_not_acknowledged_comes_back_with_the_next_attempt(broker: Broker, topic: str) -> None:
    [sent] = publish(broker, topic)
    first = pull_one(broker, topic, invisible_ms=40)

    second = pull_one(broker, topic)

    assert (first.id, second.id) == (sent, sent)
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.receipt != second.receipt


def test_a_message_in_flight_is_invisible_to_its_group(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    pull_one(broker, topic)

    assert broker.pull(topic, "g", wait_ms=100) == []


def test_acknowledging_twice_says_so(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    receipt = pull_one(broker, topic).receipt

    assert broker.ack([receipt]) == ["acked"]
    assert broker.ack([receipt]) == ["already_acked"]


def test_a_late_ack_counts_until_the_message_is_handed_out_again(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    delivery = pull_one(broker, topic, invisible_ms=1)
    wait_until(delivery.created_at_ms + 50)

    assert broker.ack([delivery.receipt]) == ["acked"]

    assert broker.pull(topic, "g", wait_ms=50) == []


def test_a_late_ack_is_stale_after_redelivery_and_takes_nothing_from_the_new_holder(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    first = pull_one(broker, topic, invisible_ms=20)
    second = pull_one(broker, topic)

    assert broker.ack([first.receipt]) == ["stale"]

    assert broker.ack([second.receipt]) == ["acked"]


def test_a_receipt_that_nobody_was_given_is_unknown(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    delivery = pull_one(broker, topic)
    other_topic = delivery.receipt.replace(topic, "t.never-was")

    statuses = broker.ack(["nonsense", "", "a/b", "../x/0.1.0", other_topic, delivery.receipt])

    assert statuses == ["unknown", "unknown", "unknown", "unknown", "unknown", "acked"]
    assert broker.nack(["nonsense", "a/b"]) == ["stale", "stale"]
    assert broker.extend(["nonsense", "a/b"], invisible_ms=10) == ["stale", "stale"]


def test_receipts_of_many_topics_and_groups_are_settled_in_one_call(broker: Broker, topic: str) -> None:
    places = [(f"{topic}.{number}", group) for number in range(3) for group in ("g", "h")]
    for name in {name for name, _ in places}:
        publish(broker, name)
    receipts = [pull_one(broker, name, group=group).receipt for name, group in places]

    assert broker.ack([*receipts[::2], "nonsense", *receipts[1::2]]) == ["acked"] * 3 + ["unknown"] + ["acked"] * 3


def test_more_receipts_than_one_request_takes_are_settled(broker: Broker, topic: str) -> None:
    publish(broker, topic, 1_200)
    deliveries = [one for _ in range(2) for one in broker.pull(topic, "g", max_messages=1_000, invisible_ms=60_000)]

    statuses = broker.ack([one.receipt for one in deliveries])

    assert statuses == ["acked"] * 1_200


def test_settling_nothing_is_nothing(broker: Broker) -> None:
    assert broker.ack([]) == []
    assert broker.nack([]) == []
    assert broker.extend([], invisible_ms=10) == []
    assert broker.cancel([]) == []


def test_a_nack_without_delay_waits_for_the_groups_backoff(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(backoff_initial_ms=150, backoff_max_ms=150))
    publish(broker, topic)
    delivery = pull_one(broker, topic)

    start = time.monotonic()
    assert broker.nack([delivery.receipt], reason="not now") == ["requeued"]
    again = pull_one(broker, topic)

    assert time.monotonic() - start >= 0.14
    assert again.attempt == 2


def test_a_nack_with_delay_comes_back_after_the_delay_and_not_before(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    delivery = pull_one(broker, topic)

    start = time.monotonic()
    broker.nack([delivery.receipt], delay_ms=200)
    pull_one(broker, topic)

    assert 0.19 <= time.monotonic() - start < WAIT_MS / 1_000


def test_a_nack_that_does_not_count_uses_up_no_attempt(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    publish(broker, topic)
    for _ in range(3):
        delivery = pull_one(broker, topic)
        assert delivery.attempt == 1

        assert broker.nack([delivery.receipt], delay_ms=0, counts=False) == ["requeued"]

    assert pull_one(broker, topic).attempt == 1


def test_a_receipt_that_was_given_back_is_stale(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    delivery = pull_one(broker, topic)
    broker.nack([delivery.receipt], delay_ms=60_000)

    assert broker.nack([delivery.receipt]) == ["stale"]
    assert broker.extend([delivery.receipt], invisible_ms=10) == ["stale"]


def test_a_message_whose_attempts_are_used_up_is_a_dead_letter_with_its_reason(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=2))
    message = Message(id=new_message_id(), topic=topic, body=b"\xffpoison", key="k", headers={"a": "b"})
    broker.publish([message])
    broker.nack([pull_one(broker, topic).receipt], delay_ms=0, reason="first")

    statuses = broker.nack([pull_one(broker, topic).receipt], reason="no such order: 🚀")

    assert statuses == ["dead"]
    [letter], cursor = broker.admin.dead(topic, "g")
    assert (letter.id, letter.attempts, letter.reason) == (message.id, 2, "no such order: 🚀")
    assert (letter.body, letter.key, dict(letter.headers)) == (b"\xffpoison", "k", {"a": "b"})
    assert cursor is None
    assert broker.pull(topic, "g", wait_ms=50) == []


def test_a_message_that_is_never_settled_dies_after_its_last_attempt(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=2))
    [sent] = publish(broker, topic)
    pull_one(broker, topic, invisible_ms=10)
    pull_one(broker, topic, invisible_ms=10)

    assert broker.pull(topic, "g", wait_ms=200) == []

    [letter], _ = broker.admin.dead(topic, "g")
    assert (letter.id, letter.attempts) == (sent, 2)
    assert letter.reason


def test_a_dead_letter_is_redriven_once_with_its_attempts_counted_afresh(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    [sent] = publish(broker, topic)
    dead = pull_one(broker, topic)
    broker.nack([dead.receipt], reason="broken")

    assert broker.admin.redrive(topic, "g", ids=[sent, new_message_id()]) == 1
    assert broker.admin.redrive(topic, "g", ids=[sent]) == 0

    again = pull_one(broker, topic)
    assert (again.id, again.attempt) == (sent, 1)
    assert broker.ack([dead.receipt, again.receipt]) == ["stale", "acked"]
    assert broker.admin.dead(topic, "g") == ([], None)


def test_all_dead_letters_are_redriven_and_listed_by_the_page(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    ids = publish(broker, topic, 5)
    broker.nack([one.receipt for one in broker.pull(topic, "g")], reason="broken")

    first, cursor = broker.admin.dead(topic, "g", limit=3)
    second, end = broker.admin.dead(topic, "g", limit=3, after=cursor)

    assert [one.id for one in first + second] == ids
    assert end is None
    assert broker.admin.redrive(topic, "g") == 5
    assert [one.id for one in broker.pull(topic, "g")] == ids


def test_an_extension_keeps_a_message_invisible(broker: Broker, topic: str) -> None:
    for place, invisible_ms in ((f"{topic}.0", 300), (f"{topic}.1", 3_000), (f"{topic}.2", 30_000)):
        publish(broker, place)
        begun = time.monotonic()
        delivery = pull_one(broker, place, invisible_ms=invisible_ms)
        statuses = broker.extend([delivery.receipt], invisible_ms=60_000)
        if time.monotonic() - begun < invisible_ms / 1_000:  # else the machine was too busy to extend it in time
            break

    assert statuses == ["extended"]
    assert broker.pull(place, "g", wait_ms=invisible_ms + 200) == []
    assert broker.ack([delivery.receipt]) == ["acked"]


def test_an_extension_of_a_delivery_that_is_not_the_newest_is_stale(broker: Broker, topic: str) -> None:
    publish(broker, topic)
    first = pull_one(broker, topic, invisible_ms=20)
    second = pull_one(broker, topic, invisible_ms=60_000)

    assert broker.extend([first.receipt], invisible_ms=1) == ["stale"]

    assert broker.ack([second.receipt]) == ["acked"]


@pytest.mark.parametrize("invisible_ms", [0, -1, 10**12])
def test_an_invisible_time_out_of_bounds_is_refused(broker: Broker, topic: str, invisible_ms: int) -> None:
    from outbox_core.common.errors import InvalidMessage

    with pytest.raises(InvalidMessage):
        broker.pull(topic, "g", invisible_ms=invisible_ms)


def wait_until(time_ms: int) -> None:
    """Let the wall clock pass a time that the broker compares with; there is no event to wait for."""
    while time.time_ns() // 1_000_000 <= time_ms:
        time.sleep(0.005)


@pytest.mark.slow
def test_a_redrive_makes_so_many_ready_a_second(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    ids = [new_message_id() for _ in range(3)]
    broker.publish([Message(id=one, topic=topic, body=b"x") for one in ids])
    broker.nack([one.receipt for one in broker.pull(topic, "g")])

    start = time.monotonic()
    assert broker.admin.redrive(topic, "g", per_second=2) == 3

    pulled = [one.id for one in broker.pull(topic, "g")]
    assert pulled[:2] == ids[:2]
    if len(pulled) == 2:  # the third is there at once if the machine did nothing else for a second
        pulled += [one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)]
    assert pulled == ids
    assert time.monotonic() - start >= 0.99


def test_a_dead_letter_tells_how_each_of_its_attempts_went(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=6, backoff_initial_ms=1, backoff_max_ms=1))
    publish(broker, topic)
    for reason in ("out of stock", "out of stock", None):
        broker.nack([pull_one(broker, topic).receipt], delay_ms=0, reason=reason)
    broker.nack([pull_one(broker, topic).receipt], delay_ms=0, reason="stops", counts=False)
    pull_one(broker, topic, invisible_ms=1)
    broker.nack([pull_one(broker, topic).receipt], delay_ms=0, reason="out of stock")
    broker.nack([pull_one(broker, topic).receipt], reason="gone")

    [letter], _ = broker.admin.dead(topic, "g")

    assert (letter.attempts, letter.reason) == (6, "gone")
    assert letter.history == (
        ("out of stock", 2), ("refused by its consumer", 1), ("invisible time ran out", 1), ("out of stock", 1),
        ("gone", 1),
    )  # fmt: skip


def test_a_redriven_message_begins_a_new_history(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    publish(broker, topic)
    broker.nack([pull_one(broker, topic).receipt], reason="first life")
    broker.admin.redrive(topic, "g")
    pull_one(broker, topic, invisible_ms=1)
    wait_until(time.time_ns() // 1_000_000 + 50)

    [letter], _ = broker.admin.dead(topic, "g")

    assert (letter.reason, letter.history) == (
        "invisible time ran out, 1 attempts", (("invisible time ran out", 1),),
    )  # fmt: skip


def retries_and_fresh(broker: Broker, topic: str, *, retries: int, fresh: int) -> tuple[set[str], set[str]]:
    """Messages that failed once and are visible again, and others that nobody has pulled; returns their ids."""
    failed = set(publish(broker, topic, retries))
    pulled: list[Delivery] = []
    while len(pulled) < retries:
        pulled += broker.pull(topic, "g", max_messages=retries - len(pulled), wait_ms=WAIT_MS)
    assert broker.nack([delivery.receipt for delivery in pulled], delay_ms=0) == ["requeued"] * retries
    return failed, set(publish(broker, topic, fresh))


def test_at_least_half_of_a_pull_is_fresh_while_retries_wait_and_retries_get_the_rest(
    broker: Broker, topic: str
) -> None:
    failed, fresh = retries_and_fresh(broker, topic, retries=20, fresh=20)

    first = {delivery.id for delivery in broker.pull(topic, "g", max_messages=20)}
    second = {delivery.id for delivery in broker.pull(topic, "g", max_messages=20)}

    assert (len(first & fresh), len(first & failed)) == (10, 10)
    assert (len(second & fresh), len(second & failed)) == (10, 10)


def test_an_odd_pull_gives_the_odd_place_to_a_fresh_message(broker: Broker, topic: str) -> None:
    failed, fresh = retries_and_fresh(broker, topic, retries=6, fresh=6)

    for _ in range(2):
        pulled = {delivery.id for delivery in broker.pull(topic, "g", max_messages=3)}
        assert (len(pulled & fresh), len(pulled & failed)) == (2, 1)


def test_pulls_of_one_alternate_between_retries_and_fresh_messages(broker: Broker, topic: str) -> None:
    failed, fresh = retries_and_fresh(broker, topic, retries=4, fresh=4)

    pulled = [pull_one(broker, topic).id for _ in range(8)]

    assert set(pulled) == failed | fresh
    assert all((one in fresh) != (other in fresh) for one, other in pairwise(pulled))


def test_a_share_that_retries_or_fresh_messages_leave_goes_to_the_others(broker: Broker, topic: str) -> None:
    few_failed, many_fresh = retries_and_fresh(broker, f"{topic}.0", retries=1, fresh=9)
    many_failed, few_fresh = retries_and_fresh(broker, f"{topic}.1", retries=9, fresh=1)

    assert {one.id for one in broker.pull(f"{topic}.0", "g", max_messages=10)} == few_failed | many_fresh
    assert {one.id for one in broker.pull(f"{topic}.1", "g", max_messages=10)} == many_failed | few_fresh


def test_messages_that_fail_at_every_attempt_let_the_fresh_ones_through(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=100, backoff_initial_ms=1, backoff_max_ms=1))
    failing = set(publish(broker, topic, 30))
    first = broker.pull(topic, "g", max_messages=10)
    broker.nack([delivery.receipt for delivery in first])
    fresh = set(publish(broker, topic, 40))

    handled: set[str] = set()
    pulls = 0
    while handled != fresh:
        deliveries = broker.pull(topic, "g", max_messages=10, wait_ms=WAIT_MS)
        broker.nack([delivery.receipt for delivery in deliveries if delivery.id in failing])
        broker.ack([delivery.receipt for delivery in deliveries if delivery.id in fresh])
        handled |= {delivery.id for delivery in deliveries} & fresh
        pulls += 1

    assert pulls <= (20 + 40) // 5 + 1  # five fresh ones a pull, of those that have failed nobody yet the first


def expire(deliveries: list[Delivery], *, invisible_ms: int) -> None:
    """Wait until the invisible time of deliveries that were just pulled has run out."""
    assert deliveries
    wait_until(time.time_ns() // 1_000_000 + invisible_ms + 1)


def test_a_message_that_ends_its_consumer_costs_no_other_message_an_attempt(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=3))
    [poison, *innocents] = publish(broker, topic, 12)

    handled: set[str] = set()
    largest: list[int] = []
    while handled != set(innocents) or not broker.admin.dead(topic, "g")[0]:
        deliveries = broker.pull(topic, "g", max_messages=12, invisible_ms=60, wait_ms=500)
        if poison in {delivery.id for delivery in deliveries}:
            largest.append(len(deliveries))  # the consumer dies, of whatever is the first
            expire(deliveries, invisible_ms=60)
        else:
            broker.ack([delivery.receipt for delivery in deliveries])
            handled |= {delivery.id for delivery in deliveries}

    assert largest == [12, 6, 3, 1, 1, 1]
    [letter] = broker.admin.dead(topic, "g")[0]
    assert (letter.id, letter.attempts) == (poison, 3)


def test_a_consumer_that_says_what_it_begins_loses_attempts_of_that_message_alone(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=3))
    [poison, *innocents] = publish(broker, topic, 8)

    deaths = 0
    while not broker.admin.dead(topic, "g")[0]:
        deliveries = broker.pull(topic, "g", max_messages=8, invisible_ms=200, wait_ms=1_000, begins=True)
        assert {delivery.expired for delivery in deliveries} <= {deaths > 0}
        if deliveries and deaths:  # as the runner does before the handler
            [first] = [delivery for delivery in deliveries if delivery.id == poison]
            assert broker.extend([first.receipt], invisible_ms=200, begun=True) == ["extended"]
        deaths += bool(deliveries)
        wait_until(time.time_ns() // 1_000_000 + 201)

    assert deaths == 4  # the first delivery is without a report: nobody knows which message ended the consumer
    [letter] = broker.admin.dead(topic, "g")[0]
    assert (letter.id, letter.attempts) == (poison, 3)
    again = broker.pull(topic, "g", max_messages=8, wait_ms=WAIT_MS, begins=True)
    assert {(delivery.id, delivery.attempt) for delivery in again} == {(one, 1) for one in innocents}


def test_a_message_given_back_untried_is_suspected_as_before_until_a_consumer_has_tried_it(
    broker: Broker, topic: str
) -> None:
    publish(broker, topic)
    expire(broker.pull(topic, "g", invisible_ms=30, begins=True), invisible_ms=30)

    suspected = [pull_one(broker, topic, begins=True)]
    for _ in range(2):
        broker.nack([suspected[-1].receipt], counts=False, reason="consumer stops")
        suspected.append(pull_one(broker, topic, begins=True))
    broker.nack([suspected[-1].receipt], delay_ms=0, reason="tried")
    tried = pull_one(broker, topic, begins=True)

    assert [delivery.expired for delivery in suspected] == [True] * 3
    assert not tried.expired


def test_suspected_messages_given_back_untried_come_by_themselves_as_before(broker: Broker, topic: str) -> None:
    publish(broker, topic, 8)
    expire(broker.pull(topic, "g", max_messages=8, invisible_ms=30), invisible_ms=30)

    pulled: list[int] = []
    for _ in range(4):
        deliveries = broker.pull(topic, "g", max_messages=8, wait_ms=WAIT_MS)
        pulled.append(len(deliveries))
        broker.nack([delivery.receipt for delivery in deliveries], counts=False, reason="consumer stops")

    assert pulled == [4] * 4  # of the first pull one ended its consumer: half as many, and no more after that


def test_first_deliveries_are_not_cut_while_suspected_messages_are_tried_again(broker: Broker, topic: str) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=3))
    suspected = set(publish(broker, topic, 8))
    expire(broker.pull(topic, "g", max_messages=8, invisible_ms=30), invisible_ms=30)
    fresh = set(publish(broker, topic, 8))

    pulled: list[set[str]] = []
    while sum(map(len, pulled)) < 16:
        pulled.append({delivery.id for delivery in broker.pull(topic, "g", max_messages=8)})

    assert [len(ids) for ids in pulled] in ([4, 8, 4], [8, 4, 4])
    assert all(ids <= suspected or ids == fresh for ids in pulled)


def test_a_nack_that_does_not_count_is_ready_at_once_and_leaves_attempts_as_they_were(
    broker: Broker, topic: str
) -> None:
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1, backoff_initial_ms=60_000))
    publish(broker, topic)

    for _ in range(3):
        [delivery] = broker.pull(topic, "g")
        assert delivery.attempt == 1
        assert broker.nack([delivery.receipt], counts=False, reason="consumer stops") == ["requeued"]

    assert broker.admin.dead(topic, "g")[0] == []
