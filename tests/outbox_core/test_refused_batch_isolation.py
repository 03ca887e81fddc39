"""Isolation of what a broker refuses: over all small batches, all places of the culprits, and all ways to refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import log2

import pytest

from outbox_core import Message, PublishResult, PublishStatus
from outbox_core.common.errors import (
    BrokerError,
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    InvalidMessage,
    NotAuthenticated,
    NotAuthorized,
    NotSupported,
    StorageFailed,
)
from outbox_core.messages.refused_batch_isolation import publish_isolated

STORED, REJECTED, DEFERRED = PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.DEFERRED
BATCH_MAX = 6
Publish = Callable[[Sequence[Message]], Sequence[PublishResult]]


@dataclass
class RefusingBroker:
    """Stores batches as its kind does, and refuses those with a message at fault, or of a denied topic."""

    confirms: int = 0
    """How many of those before a message at fault are confirmed as it is refused, by a broker that stops there."""
    copies: Counter[str] = field(default_factory=Counter)
    stored: list[str] = field(default_factory=list)
    requests: int = 0
    fails_at: int = 0
    """The request that meets an outage instead; 0: none."""

    def whole(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Stores nothing of a batch that it refuses, as HTTP."""
        self._begin()
        if any(is_denied(message) for message in batch):
            raise NotAuthorized("no grant")
        if any(is_at_fault(message) for message in batch):
            raise BrokerRefused("bad header")
        return [self._store(message) for message in batch]

    def invalid(self, batch: Sequence[Message]) -> list[PublishResult]:
        """The same, by a client that checks messages."""
        self._begin()
        if any(is_at_fault(message) for message in batch):
            raise InvalidMessage("bad header")
        return [self._store(message) for message in batch]

    def in_order(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Stores what stands before the first at fault, and confirms some of it, as a channel of AMQP."""
        self._begin()
        results: list[PublishResult] = []
        for message in batch:
            if is_denied(message):
                raise NotAuthorized("no grant").with_answered(dict(enumerate(results[: self.confirms])))
            if is_at_fault(message):
                error = BrokerRefused("bad header").with_answered(dict(enumerate(results[: self.confirms])))
                error.in_doubt = True
                raise error
            results.append(self._store(message))
        return results

    def by_topic(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Refuses all of a topic with a message at fault, and says what it stored of the others, as Kafka."""
        self._begin()
        refused = {message.topic for message in batch if is_at_fault(message)}
        answered = {at: self._store(one) for at, one in enumerate(batch) if one.topic not in refused}
        if refused:
            raise BrokerRefused("bad header").with_answered(answered)
        return list(answered.values())

    def _begin(self) -> None:
        self.requests += 1
        if self.requests == self.fails_at:
            raise BrokerUnavailable("no answer")

    def _store(self, message: Message) -> PublishResult:
        self.copies[message.id] += 1
        self.stored.append(message.id)
        return PublishResult(message.id, STORED)


def is_at_fault(message: Message) -> bool:
    return message.body == b"!"


def is_denied(message: Message) -> bool:
    return message.topic == "denied"


def batches(letters: str) -> Iterator[list[Message]]:
    """All batches up to a size: `a` and `b` stand for a sound message of that topic, in capitals for one at fault, `d`
    for one of a denied topic.
    """
    for size in range(1, BATCH_MAX + 1):
        for shape in product(letters, repeat=size):
            yield [
                Message(
                    id=str(number), topic="denied" if letter == "d" else letter.lower(),
                    body=b"!" if letter.isupper() else b"",
                )
                for number, letter in enumerate(shape)
            ]  # fmt: skip


@pytest.mark.parametrize(("kind", "copies_max"), [("whole", 1), ("invalid", 1), ("by_topic", 1), ("in_order", 2)])
@pytest.mark.parametrize("confirms", [0, 1, BATCH_MAX])
def test_neighbours_are_stored_and_those_at_fault_alone_are_rejected(kind: str, copies_max: int, confirms: int) -> None:
    for batch in batches("abA"):
        broker = RefusingBroker(confirms=confirms)

        outcome = publish_isolated(getattr(broker, kind), batch)

        at_fault = [message.id for message in batch if is_at_fault(message)]
        expected = [REJECTED if is_at_fault(message) else STORED for message in batch]
        assert [outcome.results[place].status for place in range(len(batch))] == expected
        assert outcome.outage is None
        assert all("bad header" in str(one.error) for one in outcome.results.values() if one.status is REJECTED)
        assert set(broker.copies) == {message.id for message in batch} - set(at_fault)
        assert max(broker.copies.values(), default=1) <= copies_max
        if kind != "in_order":
            assert broker.requests <= max(1, 2 * len(at_fault) * (log2(len(batch)) + 1) + 1)


@pytest.mark.parametrize("kind", ["whole", "in_order"])
def test_a_denied_topic_is_deferred_and_the_others_are_stored(kind: str) -> None:
    for batch in batches("adA"):
        broker = RefusingBroker(confirms=1)

        outcome = publish_isolated(getattr(broker, kind), batch)

        expected = [DEFERRED if is_denied(one) else REJECTED if is_at_fault(one) else STORED for one in batch]
        assert [outcome.results[place].status for place in range(len(batch))] == expected
        assert max(broker.copies.values(), default=1) <= 3, "one for the topic's refusal, one for the message's"


@pytest.mark.parametrize("kind", ["whole", "in_order", "by_topic"])
def test_each_topic_keeps_its_order(kind: str) -> None:
    for batch in batches("abA"):
        broker = RefusingBroker(confirms=2)

        publish_isolated(getattr(broker, kind), batch)

        for topic in "ab":
            of_topic = [one.id for one in batch if one.topic == topic and not is_at_fault(one)]
            assert list(dict.fromkeys(one for one in broker.stored if one in of_topic)) == of_topic


@pytest.mark.parametrize(("kind", "copies_max"), [("whole", 1), ("by_topic", 1), ("in_order", 2)])
def test_after_an_outage_between_requests_what_has_a_result_is_not_sent_again(kind: str, copies_max: int) -> None:
    for batch in batches("aA"):
        for fails_at in range(1, 2 * len(batch) + 1):
            broker = RefusingBroker(confirms=1, fails_at=fails_at)

            first = publish_isolated(getattr(broker, kind), batch)
            left = [one for place, one in enumerate(batch) if place not in first.results]
            second = publish_isolated(getattr(broker, kind), left)

            assert (first.outage is None) == (not left), "without an outage nothing is left"
            assert len(second.results) == len(left)
            assert set(broker.copies) == {one.id for one in batch if not is_at_fault(one)}
            assert max(broker.copies.values(), default=1) <= copies_max + 1, "and one for the outage"


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailable("down"),
        BrokerThrottled("later", retry_after_ms=5),
        StorageFailed("full"),
        NotAuthenticated("who"),
        BrokerError("?"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_concerns_the_whole_broker_ends_a_batch_after_one_request(error: BrokerError) -> None:
    requests = []
    answered = {1: PublishResult("1", STORED)}

    def publish(batch: Sequence[Message]) -> list[PublishResult]:
        requests.append([message.id for message in batch])
        raise error.with_answered(answered)

    outcome = publish_isolated(publish, [Message(id=str(n), topic="a", body=b"") for n in range(3)])

    assert (outcome.results, outcome.outage, requests) == (answered, error, [["0", "1", "2"]])


def test_an_operation_that_a_broker_does_not_have_for_a_topic_is_deferred_for_that_topic() -> None:
    def publish(batch: Sequence[Message]) -> list[PublishResult]:
        if any(message.topic == "b" for message in batch):
            raise NotSupported("no such thing")
        return [PublishResult(message.id, STORED) for message in batch]

    outcome = publish_isolated(publish, [Message(id=topic, topic=topic, body=b"") for topic in "abc"])

    assert [outcome.results[place].status for place in range(3)] == [STORED, DEFERRED, STORED]


def test_no_request_is_made_when_there_is_no_time_for_it() -> None:
    broker = RefusingBroker()
    batch = [Message(id=str(n), topic="a", body=b"!" if n == 3 else b"") for n in range(4)]

    outcome = publish_isolated(broker.whole, batch, in_time=lambda: broker.requests < 2)

    assert (dict(broker.copies), sorted(outcome.results), outcome.outage) == ({"0": 1, "1": 1}, [0, 1], None)


def test_a_batch_of_nothing_needs_no_request() -> None:
    broker = RefusingBroker()

    assert publish_isolated(broker.whole, []).results == {}
    assert broker.requests == 0
