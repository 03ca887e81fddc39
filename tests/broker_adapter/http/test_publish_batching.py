"""Small publishes of many threads share requests, and each gets what is its own: results, order, errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from broker_adapter.http.publish_batching import CALL_MESSAGES_MAX, BatchLimits, PublishBatcher, _Call, _CallQueue
from outbox_core import Message
from outbox_core.common.errors import BrokerThrottled, BrokerUnavailable, OutboxError
from outbox_core.messages.limits import BATCH_MESSAGES_MAX
from outbox_core.messages.message import PublishResult, PublishStatus
from outbox_core.messages.publish_guard import Guard, allow
from tests.outbox_broker.polling import until

DEADLINE_S = 120.0


class Wire:
    """A send() that goes on when it is told to; `requests` are the ids of each."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.arrived = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.errors: list[BaseException | None] = []

    def send(self, messages: Sequence[Message], guard: Guard) -> list[PublishResult]:
        guard()
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
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S, limits=BatchLimits(requests_max=1))

    def start(*ids: str, topic: str = "t", guard: Guard = allow) -> Future[list[str]]:
        before = gathering.waiting
        on_its_way = bool(wire.requests)
        batch = [Message(id=one, topic=topic, body=b"b") for one in ids]
        future = pool.submit(lambda: _ids(gathering.publish(batch, guard)))
        if on_its_way:
            until(lambda: gathering.waiting == before + 1)
        else:
            assert wire.arrived.acquire(timeout=DEADLINE_S)
        return future

    yield start
    wire.go_on.release(1_000)
    pool.shutdown()


def _ids(outcomes: Sequence[PublishResult]) -> list[str]:
    return [one.id for one in outcomes if isinstance(one, PublishResult)]


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
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S)
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


def test_an_interrupt_of_the_thread_that_sends_is_its_own_and_the_others_who_shared_its_request_send_again(
    wire: Wire, publish: Any
) -> None:
    wire.errors = [None, KeyboardInterrupt()]
    futures = [publish("a"), publish("b"), publish("c"), publish("d")]
    wire.go_on.release()
    assert futures[0].result(DEADLINE_S) == ["a"]
    assert wire.arrived.acquire(timeout=DEADLINE_S)
    behind = publish("e")

    wire.go_on.release(4)

    assert isinstance(futures[1].exception(DEADLINE_S), KeyboardInterrupt)
    assert [one.result(DEADLINE_S) for one in futures[2:]] == [["c"], ["d"]]
    assert behind.result(DEADLINE_S) == ["e"]
    assert wire.requests[:2] == [["a"], ["b", "c", "d"]]
    assert sorted(wire.requests[2:]) == [["c"], ["d"], ["e"]]


def test_what_is_sent_again_behind_an_interrupt_has_its_permit_again_and_the_errors_of_its_own_request(
    wire: Wire, publish: Any
) -> None:
    permit = Permit()
    wire.errors = [None, KeyboardInterrupt(), BrokerUnavailable("gone")]
    futures = [publish("a"), publish("b"), publish("c", guard=permit), publish("d")]
    wire.go_on.release()
    assert futures[0].result(DEADLINE_S) == ["a"]
    assert wire.arrived.acquire(timeout=DEADLINE_S)
    permit.is_valid = False

    wire.go_on.release(2)

    assert isinstance(futures[1].exception(DEADLINE_S), KeyboardInterrupt)
    errors = [one.exception(DEADLINE_S) for one in futures[2:]]
    assert [(type(error), str(error)) for error in errors] == [
        (BrokerUnavailable, "withdrawn"),
        (BrokerUnavailable, "gone"),
    ]
    assert wire.requests == [["a"], ["b", "c", "d"], ["d"]]


class Permit:
    """May be withdrawn; counts how often it was read."""

    def __init__(self) -> None:
        self.is_valid = True
        self.reads = 0

    def __call__(self) -> None:
        self.reads += 1
        if not self.is_valid:
            raise BrokerUnavailable("withdrawn")


def test_what_may_not_be_sent_any_more_when_its_turn_comes_is_left_out_and_the_others_go(
    wire: Wire, publish: Any
) -> None:
    permits = {name: Permit() for name in "bcde"}
    futures = {"a": publish("a"), **{name: publish(name, guard=permit) for name, permit in permits.items()}}
    assert [one.reads for one in permits.values()] == [0] * 4, "read before their turn"
    permits["b"].is_valid = permits["d"].is_valid = False  # b would send for all

    wire.go_on.release(2)

    assert [futures[name].result(DEADLINE_S) for name in "ace"] == [["a"], ["c"], ["e"]]
    for name in "bd":
        assert isinstance(error := futures[name].exception(DEADLINE_S), BrokerUnavailable)
        assert str(error) == "withdrawn"
    assert wire.requests == [["a"], ["c", "e"]]


def test_if_nothing_may_be_sent_any_more_there_is_no_request_and_the_next_publish_goes_at_once(wire: Wire) -> None:
    permit = Permit()
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S, limits=BatchLimits(requests_max=1))
    batches = [[Message(id=name, topic="t", body=b"")] for name in "abcd"]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(gathering.publish, batches[0])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        waiting = [pool.submit(gathering.publish, batch, permit) for batch in batches[1:3]]
        until(lambda: gathering.waiting == 2)
        permit.is_valid = False
        wire.go_on.release(2)

        assert _ids(first.result(DEADLINE_S)) == ["a"]
        assert [str(one.exception(DEADLINE_S)) for one in waiting] == ["withdrawn"] * 2
    assert _ids(gathering.publish(batches[3])) == ["d"]
    assert wire.requests == [["a"], ["d"]]


def test_a_publish_that_need_not_wait_is_not_sent_without_its_permit(wire: Wire) -> None:
    permit = Permit()
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S)
    wire.go_on.release(1)

    gathering.publish([Message(id="a", topic="t", body=b"")], permit)
    permit.is_valid = False
    with pytest.raises(BrokerUnavailable, match="withdrawn"):
        gathering.publish([Message(id="b", topic="t", body=b"")], permit)

    assert wire.requests == [["a"]]


class Shards:
    """Four shards whose owner publishes by one client; the test ends requests and withdraws permits, one at a time."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.permits = [Permit() for _ in range(4)]
        self.calls: list[tuple[int, Future[list[str]]]] = []
        self.sent: list[str] = []
        self.late: list[str] = []
        self._pool = pool
        self._lock = threading.Lock()
        self._on_their_way: list[tuple[list[str], threading.Event]] = []
        self._coalescer = PublishBatcher(self._send, address="host:1", wait_s_max=DEADLINE_S)

    def publish(self, shard: int) -> None:
        message = Message(id=f"{shard}-{len(self.calls)}", topic="t", body=b"")
        future = self._pool.submit(lambda: _ids(self._coalescer.publish([message], self.permits[shard])))
        self.calls.append((shard, future))
        until(self._stands)

    def end_request(self, number: int) -> None:
        if self._on_their_way:
            self._on_their_way.pop(number % len(self._on_their_way))[1].set()
            until(self._stands)

    def withdraw(self, shard: int) -> None:
        with self._lock:
            self.permits[shard].is_valid = False

    def end_all(self) -> None:
        while not all(future.done() for _, future in self.calls):
            self.end_request(0)

    def _send(self, messages: Sequence[Message], guard: Guard) -> list[PublishResult]:
        ids, ended = [one.id for one in messages], threading.Event()
        with self._lock:
            guard()
            self.sent += ids
            self.late += [one for one in ids if not self.permits[int(one[0])].is_valid]
            self._on_their_way.append((ids, ended))
        assert ended.wait(DEADLINE_S)
        return [PublishResult(one, PublishStatus.STORED) for one in ids]

    def _stands(self) -> bool:
        """Whether each call is done, on its way, waiting, or held back beside others that are on their way: then
        nothing happens by itself.
        """
        sent = {one for ids, _ in list(self._on_their_way) for one in ids}
        left = [f"{shard}-{at}" for at, (shard, future) in enumerate(self.calls) if not future.done()]
        held_back = sum(one not in sent and not self.permits[int(one[0])].is_valid for one in left)
        return 0 <= len(left) - len(sent) - self._coalescer.waiting <= held_back


@pytest.mark.parametrize("seed", range(60))
def test_no_history_of_publishes_and_answers_sends_what_its_permit_does_not_allow_any_more(seed: int) -> None:
    random = Random(seed)
    with ThreadPoolExecutor(64) as pool:
        shards = Shards(pool)
        for _ in range(40):
            act = random.choice([shards.publish] * 6 + [shards.end_request] * 3 + [shards.withdraw])
            act(random.randrange(4))
        shards.end_all()

        answered = [future.result(0) for _, future in shards.calls if future.exception(0) is None]
        refused = [shard for shard, future in shards.calls if future.exception(0) is not None]
    assert shards.late == []
    assert sorted(shards.sent) == sorted(one for ids in answered for one in ids)
    assert not any(shards.permits[shard].is_valid for shard in refused)


def test_an_error_of_the_first_hands_over_to_those_who_wait(wire: Wire, publish: Any) -> None:
    wire.errors = [BrokerUnavailable("gone"), None]
    futures = [publish("a"), publish("b")]

    wire.go_on.release(2)

    assert isinstance(futures[0].exception(DEADLINE_S), OutboxError)
    assert futures[1].result(DEADLINE_S) == ["b"]


def test_a_call_that_has_waited_for_too_long_is_never_sent(wire: Wire) -> None:
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=0.05, limits=BatchLimits(requests_max=1))
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
    queue = _CallQueue(BatchLimits(), in_flight=1, waiting=[behind])

    left = queue.leave(leader)

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
    gathering = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S)
    large = [Message(id=f"m{number}", topic="t", body=b"") for number in range(CALL_MESSAGES_MAX + 1)]
    with ThreadPoolExecutor(2) as pool:
        pool.submit(gathering.publish, large[:1])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        pool.submit(gathering.publish, large)

        assert wire.arrived.acquire(timeout=DEADLINE_S)
        wire.go_on.release(2)

    assert [len(one) for one in wire.requests] == [1, CALL_MESSAGES_MAX + 1]
