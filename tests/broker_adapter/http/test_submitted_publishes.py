"""Messages that are submitted: shared requests, in order; each future tells its own; bounded, and sent by the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from broker_adapter.http import HttpBroker
from broker_adapter.http.publish_batching import BatchLimits, PublishBatcher
from outbox_core import Message
from outbox_core.common.errors import (
    BrokerRefused,
    BrokerThrottled,
    BrokerUnavailable,
    ConfigurationError,
    NotAuthorized,
)
from outbox_core.messages.message import PublishResult, PublishStatus
from outbox_core.messages.publish_guard import Guard
from tests.broker_adapter.servers import served
from tests.outbox_broker.polling import until

DEADLINE_S = 120.0


class Wire:
    """A send() that goes on when it is told to; `requests` are the ids of each."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.arrived = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.errors: dict[str, BaseException] = {}

    def send(self, messages: Sequence[Message], guard: Guard) -> list[PublishResult]:
        guard()
        self.requests.append([one.id for one in messages])
        self.arrived.release()
        assert self.go_on.acquire(timeout=DEADLINE_S)
        for one in messages:
            if one.topic in self.errors:
                raise self.errors[one.topic]
        return [PublishResult(one.id, PublishStatus.STORED) for one in messages]


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def open_line(wire: Wire) -> Iterator[Callable[..., PublishBatcher]]:
    """Makes lines with limits of the test's; they are closed at its end."""
    lines: list[PublishBatcher] = []

    def open_one(**limits: float) -> PublishBatcher:
        made = PublishBatcher(wire.send, address="host:1", wait_s_max=DEADLINE_S, limits=BatchLimits(**limits))  # type: ignore[arg-type]
        lines.append(made)
        return made

    yield open_one
    wire.go_on.release(1_000)
    for one in lines:
        one.close()


@pytest.fixture
def line(open_line: Callable[..., PublishBatcher]) -> PublishBatcher:
    return open_line()


class SendingThread:
    """The thread that sends for a line, as a callback of a future sees it."""

    def __init__(self, future: Future[PublishResult]) -> None:
        self._seen: SimpleQueue[threading.Thread] = SimpleQueue()
        future.add_done_callback(lambda _: self._seen.put(threading.current_thread()))

    def ended(self) -> bool:
        """Wait for its end."""
        thread = self._seen.get(timeout=DEADLINE_S)
        assert thread is not threading.current_thread()
        thread.join(DEADLINE_S)
        return not thread.is_alive()


def message(message_id: str, *, topic: str = "t", size: int = 1) -> Message:
    return Message(id=message_id, topic=topic, body=b"b" * size)


def submit_behind_a_request(line: PublishBatcher, wire: Wire, *messages: Message) -> list[Future[PublishResult]]:
    """Submit the first, and the others while its request is on its way."""
    first = line.submit(messages[0])
    assert wire.arrived.acquire(timeout=DEADLINE_S)
    return [first, *(line.submit(one) for one in messages[1:])]


def ids(futures: Sequence[Future[PublishResult]]) -> list[str]:
    return [one.result(DEADLINE_S).id for one in futures]


def test_what_is_submitted_while_a_request_is_on_its_way_shares_the_next_one_in_order(
    line: PublishBatcher, wire: Wire
) -> None:
    futures = submit_behind_a_request(line, wire, *(message(one) for one in "abcd"))

    wire.go_on.release(2)

    assert ids(futures) == ["a", "b", "c", "d"]
    assert wire.requests == [["a"], ["b", "c", "d"]]


def test_messages_of_many_topics_share_a_request_and_a_refusal_is_that_of_its_topic(
    line: PublishBatcher, wire: Wire
) -> None:
    wire.errors["bad"] = NotAuthorized("not yours")
    futures = submit_behind_a_request(
        line, wire, message("a"), message("b", topic="bad"), message("c", topic="u"), message("d", topic="bad")
    )

    wire.go_on.release(4)

    assert ids([futures[0], futures[2]]) == ["a", "c"]
    errors = [futures[place].exception(DEADLINE_S) for place in (1, 3)]
    assert [str(one) for one in errors if isinstance(one, NotAuthorized)] == ["not yours"] * 2
    assert errors[0] is not errors[1]
    assert wire.requests == [["a"], ["b", "c", "d"], ["b", "d"], ["c"]]


def test_what_is_submitted_waits_for_its_turn_with_those_who_publish_and_shares_their_request(
    open_line: Callable[..., PublishBatcher], wire: Wire
) -> None:
    line = open_line(requests_max=1)
    wire.errors["bad"] = BrokerRefused("too large")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(line.publish, [message("a")])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        submitted = line.submit(message("b"))
        until(lambda: line.waiting == 1)
        refused = pool.submit(line.publish, [message("c", topic="bad")])
        until(lambda: line.waiting == 2)

        wire.go_on.release(4)

        assert [result.id for result in first.result(DEADLINE_S)] == ["a"]
        assert submitted.result(DEADLINE_S).status is PublishStatus.STORED
        assert isinstance(refused.exception(DEADLINE_S), BrokerRefused)
    assert wire.requests[:2] == [["a"], ["b", "c"]]
    assert sorted(wire.requests[2:]) == [["b"], ["c"]]


def test_an_interrupt_of_one_who_publishes_says_nothing_of_what_was_submitted_and_shared_the_request(
    open_line: Callable[..., PublishBatcher], wire: Wire
) -> None:
    line = open_line(requests_max=1)
    wire.errors["bad"] = KeyboardInterrupt()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(line.publish, [message("a")])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        interrupted = pool.submit(line.publish, [message("b", topic="bad")])
        until(lambda: line.waiting == 1)
        submitted = line.submit(message("c"))
        until(lambda: line.waiting == 2)

        wire.go_on.release(3)

        assert [result.id for result in first.result(DEADLINE_S)] == ["a"]
        assert isinstance(interrupted.exception(DEADLINE_S), KeyboardInterrupt)
        assert submitted.result(DEADLINE_S).status is PublishStatus.STORED
    assert wire.requests == [["a"], ["b", "c"], ["c"]]


@pytest.mark.parametrize("is_submitted", [False, True], ids=["in publish()", "submitted"])
def test_a_defect_of_one_message_is_its_own_and_not_that_of_those_who_shared_its_request(
    open_line: Callable[..., PublishBatcher], wire: Wire, is_submitted: bool
) -> None:
    line = open_line(requests_max=1)
    wire.errors["bad"] = OverflowError("cannot be encoded")
    topics = ("bad", "t") if is_submitted else ("t", "bad")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(line.publish, [message("a")])
        assert wire.arrived.acquire(timeout=DEADLINE_S)
        submitted = line.submit(message("b", topic=topics[0]))
        until(lambda: line.waiting == 1)
        called = pool.submit(line.publish, [message("c", topic=topics[1])])
        until(lambda: line.waiting == 2)

        wire.go_on.release(4)

        assert [result.id for result in first.result(DEADLINE_S)] == ["a"]
        outcomes = [submitted.exception(DEADLINE_S), called.exception(DEADLINE_S)]
    assert [type(outcome) for outcome in outcomes] == [
        OverflowError if topic == "bad" else type(None) for topic in topics
    ]


def test_a_message_that_is_refused_is_rejected_alone(line: PublishBatcher, wire: Wire) -> None:
    wire.errors["bad"] = BrokerRefused("too large")
    futures = submit_behind_a_request(line, wire, message("a"), message("b", topic="bad"), message("c"))

    wire.go_on.release(9)

    assert ids(futures) == ["a", "b", "c"]
    statuses = [one.result(DEADLINE_S).status for one in futures]
    assert statuses == [PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.STORED]


def test_an_error_of_a_request_meets_all_who_share_it_and_each_gets_one_of_its_own(
    line: PublishBatcher, wire: Wire
) -> None:
    wire.errors["bad"] = BrokerThrottled("later", retry_after_ms=7)
    futures = submit_behind_a_request(line, wire, message("a"), message("b"), message("c", topic="bad"))

    wire.go_on.release(2)

    errors = [one.exception(DEADLINE_S) for one in futures[1:]]
    assert [one.retry_after_ms for one in errors if isinstance(one, BrokerThrottled)] == [7, 7]
    assert errors[0] is not errors[1]


def test_a_defect_is_told_to_who_waits_and_the_next_are_sent(line: PublishBatcher, wire: Wire) -> None:
    wire.errors["bad"] = RuntimeError("a defect")
    wire.go_on.release(2)

    failed = line.submit(message("a", topic="bad"))

    assert isinstance(failed.exception(DEADLINE_S), RuntimeError)
    assert ids([line.submit(message("b"))]) == ["b"]


def test_a_callback_that_ends_its_thread_ends_nobody_elses_message(line: PublishBatcher, wire: Wire) -> None:
    def leave(_: Future[PublishResult]) -> None:
        raise SystemExit(1)

    futures = submit_behind_a_request(line, wire, *(message(one) for one in "abc"))
    for one in futures[:2]:
        one.add_done_callback(leave)

    wire.go_on.release(3)

    assert ids([*futures, line.submit(message("d"))]) == ["a", "b", "c", "d"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_waits_is_told_when_the_thread_that_sends_is_ended_and_another_goes_on(
    line: PublishBatcher, wire: Wire
) -> None:
    wire.errors["bad"] = SystemExit(1)
    futures = submit_behind_a_request(line, wire, message("a", topic="bad"), message("b"), message("c"))
    thread = SendingThread(futures[0])

    wire.go_on.release(2)
    errors = [one.exception(DEADLINE_S) for one in futures]

    assert [type(one) for one in errors] == [BrokerUnavailable] * 3
    assert ["may have arrived" in str(error) for error in errors] == [True, False, False]
    assert ["was not sent" in str(error) for error in errors] == [False, True, True]
    assert thread.ended()
    assert ids([line.submit(message("d"))]) == ["d"]


def test_a_thread_that_cannot_be_started_takes_no_message_and_the_next_submit_tries_again(
    line: PublishBatcher, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wire.go_on.release(2)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            line.submit(message("a"))

    assert ids([line.submit(message("b"))]) == ["b"]
    assert wire.requests == [["b"]]


def test_no_request_carries_more_than_a_request_may(open_line: Callable[..., PublishBatcher], wire: Wire) -> None:
    line = open_line(request_messages_max=2, request_bytes_max=10)
    sizes = {"a": 1, "b": 1, "c": 1, "d": 6, "e": 6, "f": 30}
    futures = submit_behind_a_request(line, wire, *(message(one, size=size) for one, size in sizes.items()))

    wire.go_on.release(6)

    assert ids(futures) == list(sizes)
    assert wire.requests == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]


def test_who_submits_more_than_there_is_room_for_waits_and_then_is_told(wire: Wire) -> None:
    line = PublishBatcher(wire.send, address="host:1", wait_s_max=0.05, limits=BatchLimits(submitted_max=2))
    futures = submit_behind_a_request(line, wire, message("a"), message("b"))

    with pytest.raises(BrokerUnavailable, match="2 messages wait for host:1"):
        line.submit(message("c"))
    wire.go_on.release(3)

    assert ids(futures) == ["a", "b"]
    assert ids([line.submit(message("d"))]) == ["d"]
    line.close()
    assert "c" not in [one for found in wire.requests for one in found]


def test_what_tells_of_one_may_submit_the_next_even_where_there_is_no_room(
    open_line: Callable[..., PublishBatcher], wire: Wire
) -> None:
    line = open_line(submitted_max=1)
    wire.go_on.release(100)
    told: list[str] = []
    done = threading.Event()

    def more(future: Future[PublishResult]) -> None:
        told.append(future.result().id)
        if len(told) == 50:
            done.set()
        else:
            line.submit(message(f"m{len(told)}")).add_done_callback(more)

    line.submit(message("m0")).add_done_callback(more)

    assert done.wait(DEADLINE_S)
    assert told == [f"m{number}" for number in range(50)]


def test_what_is_taken_back_before_it_is_sent_is_not_sent(line: PublishBatcher, wire: Wire) -> None:
    futures = submit_behind_a_request(line, wire, *(message(one) for one in "abc"))

    assert futures[1].cancel()
    assert not futures[0].cancel(), "it is on its way"
    wire.go_on.release(4)

    assert ids([futures[0], futures[2]]) == ["a", "c"]
    assert wire.requests == [["a"], ["c"]]


def test_the_end_sends_what_is_left_and_takes_nothing_more(line: PublishBatcher, wire: Wire) -> None:
    futures = submit_behind_a_request(line, wire, *(message(one) for one in "abc"))
    wire.go_on.release(2)

    line.close()
    line.close()

    assert all(one.done() for one in futures)
    with pytest.raises(ConfigurationError):
        line.submit(message("d"))


def test_a_thread_with_nothing_to_do_ends_and_another_goes_on(
    open_line: Callable[..., PublishBatcher], wire: Wire
) -> None:
    line = open_line(idle_s_max=0.01)
    futures = submit_behind_a_request(line, wire, message("a"))
    thread = SendingThread(futures[0])
    wire.go_on.release(2)
    assert ids(futures) == ["a"]

    assert thread.ended()

    assert ids([line.submit(message("b"))]) == ["b"]


def test_a_child_of_a_fork_leaves_what_was_submitted_to_its_parent(line: PublishBatcher, wire: Wire) -> None:
    futures = submit_behind_a_request(line, wire, message("a"), message("b"))

    line.reset_after_fork()
    child = line.submit(message("c"))
    wire.go_on.release(3)

    assert ids([*futures, child]) == ["a", "b", "c"]
    assert sorted(wire.requests) == [["a"], ["b"], ["c"]]


def test_what_is_submitted_to_a_broker_is_stored_in_order_and_awaited_by_asyncio_as_well(tmp_path: Path) -> None:
    with served(tmp_path / "data") as server:
        broker = HttpBroker(server.url)
        futures = [broker.submit(message(f"m{number}", topic=f"t{number % 2}")) for number in range(200)]

        async def awaited() -> PublishResult:
            return await asyncio.wrap_future(broker.submit(message("m0", topic="t0")))

        again = asyncio.run(awaited())

        assert {one.result(DEADLINE_S).status for one in futures} == {PublishStatus.STORED}
        assert again.status is PublishStatus.DUPLICATE
        pulled = broker.pull("t1", "g", max_messages=200)
        assert [one.id for one in pulled] == [f"m{number}" for number in range(1, 200, 2)]
        last = broker.submit(message("last"))
        broker.close()
        assert last.result(0).status is PublishStatus.STORED
