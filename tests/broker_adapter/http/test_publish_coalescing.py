"""Small publishes of many threads share requests, and each gets what is its own: results, order, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from broker_adapter.http.publish_coalescing import CALL_MESSAGES_MAX, Outcome, PublishBatcher, _Call, _Lane, _leave
from outbox_core import Message
from outbox_core.common.errors import BrokerThrottled, BrokerUnavailable, OutboxError
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import PublishResult, PublishStatus

DEADLINE_S = 120.0


class Wire:
    """A send() that goes on when it is told to; `requests` are the ids of each."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.arrived = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.errors: list[BaseException | None] = []

    def send(self, messages: Sequence[Message]) -> list[PublishResult]:
        self.requests.append([one.id for one in messages])
        self.arrived.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return [PublishResult(one.id, PublishStatus.STORED) for one in messages]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def publish(wire: Wire) -> Any:
    """Publish ids in a thread of its own; gives the future of the ids of the results."""
    pool = ThreadPoolExecutor(64)
    gathering = PublishBatcher(wire.send, place="host:1", wait_s_max=DEADLINE_S, on_their_way_max=1)

    def start(*ids: str, topic: str = "t") -> Future[list[str]]:
        before = gathering.waiting
        on_its_way = bool(wire.requests)
        batch = [Message(id=one, topic=topic, body=b"b") for one in ids]
        future = pool.submit(lambda: _ids(gathering.publish(batch)))
        if on_its_way:
            until(lambda: gathering.waiting == before + 1)
        else:
            assert wire.arrived.acquire(timeout=DEADLINE_S)
        return future

    yield start
    wire.go_on.release(1_000)
    pool.shutdown()


def _ids(outcomes: Sequence[Outcome]) -> list[str]:
    return [one.id for one in outcomes if isinstance(one, PublishResult)]


def until(true: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(4_000):
        if true():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not come about")


def test_a_publish_alone_is_sent_at_once_and_alone(wire: Wire, publish: Any) -> None:
    first = publish("a", "b")

    wire.go_on.release()

    assert first.result(DEADLINE_S) == ["a", "b"]
    assert wire.requests == [["a", "b"]]


def test_those_who_come_while_a_request_is_on_its_way_share_the_next_one(wire: Wire, publish: Any) -> None:
    futures = [publish("a"), publish("b", "c"), publish("d", topic="u"), publish("e")]

    wire.go_on.release(2)

    assert [one.result(DEADLINE_S) for one in futures] == [["a"], ["b", "c"], ["d"], ["e"]]
    assert wire.requests == [["a"], ["b", "c", "d", "e"]]


def test_two_requests_are_on_their_way_and_the_next_goes_when_either_ends(wire: Wire) -> None:
    gathering = PublishBatcher(wire.send, place="host:1", wait_s_max=DEADLINE_S)
    with ThreadPoolExecutor(5) as pool:

        def publish(name: str) -> Future[list[str]]:
            return pool.submit(lambda: _ids(gathering.publish([Message(id=name, topic="t", body=b"")])))

        futures = [publish(name) for name in "ab"]
        for _ in futures:
            assert wire.arrived.acquire(timeout=DEADLINE_S)
        for count, name in enumerate("cde", 1):
            futures.append(publish(name))
            until(lambda: gathering.waiting == count)  # noqa: B023  (it has returned before the next)
        wire.go_on.release()
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        three = [len(one) for one in wire.requests]
        wire.go_on.release(2)

        assert [one.result(DEADLINE_S) for one in futures] == [[name] for name in "abcde"]
    assert three == [1, 1, 3]
    assert gathering.waiting == 0


def test_an_error_meets_those_who_shared_the_request_and_nobody_else(wire: Wire, publish: Any) -> None:
    wire.errors = [None, BrokerThrottled("later", retry_after_ms=7), None]
    futures = [publish("a"), publish("b"), publish("c")]
    wire.go_on.release()
    assert futures[0].result(DEADLINE_S) == ["a"]
    assert wire.arrived.acquire(timeout=DEADLINE_S)
    behind = publish("d")

    wire.go_on.release(2)

    caught = [one.exception(DEADLINE_S) for one in futures[1:]]
    assert [(type(one), one.retry_after_ms) for one in caught if isinstance(one, BrokerThrottled)] == [
        (BrokerThrottled, 7)
    ] * 2
    assert caught[0] is not caught[1]
    assert behind.result(DEADLINE_S) == ["d"]


def test_an_interrupt_of_the_thread_that_sends_leaves_nobody_waiting(wire: Wire, publish: Any) -> None:
    wire.errors = [None, KeyboardInterrupt(), None]
    futures = [publish("a"), publish("b"), publish("c")]
    wire.go_on.release()
    assert futures[0].result(DEADLINE_S) == ["a"]
    assert wire.arrived.acquire(timeout=DEADLINE_S)
    behind = publish("d")

    wire.go_on.release(2)

    assert isinstance(futures[1].exception(DEADLINE_S), KeyboardInterrupt)
    assert isinstance(futures[2].exception(DEADLINE_S), BrokerUnavailable)
    assert behind.result(DEADLINE_S) == ["d"]


def test_an_error_of_the_first_hands_over_to_those_who_wait(wire: Wire, publish: Any) -> None:
    wire.errors = [BrokerUnavailable("gone"), None]
    futures = [publish("a"), publish("b")]

    wire.go_on.release(2)

    assert isinstance(futures[0].exception(DEADLINE_S), OutboxError)
    assert futures[1].result(DEADLINE_S) == ["b"]


def test_a_call_that_has_waited_for_too_long_is_never_sent(wire: Wire) -> None:
    gathering = PublishBatcher(wire.send, place="host:1", wait_s_max=0.05, on_their_way_max=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gathering.publish, [Message(id="a", topic="t", body=b"")])
        assert wire.arrived.acquire(timeout=DEADLINE_S)

        with pytest.raises(BrokerUnavailable, match="not sent"):
            gathering.publish([Message(id="b", topic="t", body=b"")])

        wire.go_on.release(2)
        assert len(first.result(DEADLINE_S)) == 1
    gathering.publish([Message(id="c", topic="t", body=b"")])
    assert wire.requests == [["a"], ["c"]], "nobody is asked to send who has gone"


def test_one_who_goes_when_it_was_to_send_for_others_leaves_that_to_the_next() -> None:
    leader, other, behind = (_Call([Message(id=one, topic="t", body=b"")]) for one in "abc")
    leader.leads = [leader, other]
    lane = _Lane(on_their_way=1, waiting=[behind])

    left = _leave(lane, leader)

    assert left
    assert other.leads == [other, behind]
    assert other.woken.is_set()
    assert not behind.woken.is_set()


def test_no_request_carries_more_than_a_request_may(wire: Wire, publish: Any) -> None:
    count = BATCH_MESSAGES_MAX // CALL_MESSAGES_MAX + 2
    futures = [publish("first")]
    futures += [publish(*(f"{call}-{one}" for one in range(CALL_MESSAGES_MAX))) for call in range(count)]

    wire.go_on.release(10)

    assert all(one.result(DEADLINE_S) for one in futures)
    assert [len(one) for one in wire.requests] == [1, BATCH_MESSAGES_MAX, 2 * CALL_MESSAGES_MAX]


def test_a_large_publish_waits_for_nobody(wire: Wire, publish: Any) -> None:
    gathering = PublishBatcher(wire.send, place="host:1", wait_s_max=DEADLINE_S)
    large = [Message(id=f"m{number}", topic="t", body=b"") for number in range(CALL_MESSAGES_MAX + 1)]
    with ThreadPoolExecutor(2) as pool:
        pool.submit(gathering.publish, large[:1])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        pool.submit(gathering.publish, large)

        assert wire.arrived.acquire(timeout=DEADLINE_S)
        wire.go_on.release(2)

    assert [len(one) for one in wire.requests] == [1, CALL_MESSAGES_MAX + 1]
