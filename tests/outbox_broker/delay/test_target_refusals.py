"""What a target does not take: "not now" is tried again soon, "never" is kept alone with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from outbox_broker.delay_service.delay_proxy import CLAIM_AHEAD_MS, DelayProxy
from outbox_broker.delay_service.target_publisher import PARKED_AGAIN_MS
from outbox_broker.http.broker_metrics import BrokerMetrics
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable
from outbox_core.messages.message import PublishResult, PublishStatus
from outbox_core.messages.publish_guard import PublishTarget
from outbox_core.protocol.wire import RefusedMessage
from tests.outbox_broker.delay.conftest import NOW_MS


class Queue:
    """A target of bounded topics that knows no ids: each copy counts."""

    def __init__(self, clock: ManualClock) -> None:
        self.room: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.came_at_ms: dict[str, int] = {}
        self.requests: list[int] = []
        self.takes_poison = False
        self.out_after: int | None = None
        """Messages that it takes before an outage, which it tells of with what it took."""
        self.in_doubt = 0
        """How many messages, the first ones, an outage leaves without an answer at the next request."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Called when a request has come."""
        self._clock = clock

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        self.requests.append(len(batch))
        self.meanwhile()
        if not self.takes_poison and any(one.body == b"poison" for one in batch):
            raise BrokerRefused("the header CC is the broker's own")
        if in_doubt := self.in_doubt:
            self.in_doubt = 0
            answers = self.publish(batch[in_doubt:])
            raise BrokerUnavailable("out").with_answered(dict(enumerate(answers, start=in_doubt)))
        results: list[PublishResult] = []
        for message in batch:
            if self.out_after is not None and len(results) >= self.out_after:
                raise BrokerUnavailable("out").with_answered(dict(enumerate(results)))
            if self.room[message.topic] <= 0:
                results.append(PublishResult(message.id, PublishStatus.DEFERRED, "the queue is full"))
                continue
            self.room[message.topic] -= 1
            self.copies[message.id] += 1
            self.came_at_ms.setdefault(message.id, self._clock.now_ms() - NOW_MS)
            results.append(PublishResult(message.id, PublishStatus.STORED))
        return results


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def queue(clock: ManualClock) -> Queue:
    return Queue(clock)


@pytest.fixture
def opened_front(front_of: Callable[[PublishTarget], DelayProxy], queue: Queue) -> Callable[[], DelayProxy]:
    """Open the delay service, again after a close."""
    return lambda: front_of(queue)


@pytest.fixture
def front(opened_front: Callable[[], DelayProxy]) -> DelayProxy:
    return opened_front()


def publish(front: DelayProxy, topic: str, *ids: str, poison: str = "") -> None:
    """Messages for now."""
    front.publish([Message(id=one, topic=topic, body=b"poison" if one == poison else b"x") for one in ids])


def pass_time(front: DelayProxy, clock: ManualClock, ms: int, *, step_ms: int = 100) -> None:
    """Turn the service as time passes."""
    for _ in range(ms // step_ms):
        while front.service.turn() == 0:
            pass
        clock.advance(step_ms)


def test_what_meets_an_obstacle_of_two_seconds_comes_seconds_later(
    front: DelayProxy, queue: Queue, clock: ManualClock
) -> None:
    publish(front, "missing", "m")
    publish(front, "free", "f")
    queue.room["free"] = 1
    pass_time(front, clock, 2_000)
    queue.room["missing"] = 1

    pass_time(front, clock, 10_000)

    assert queue.came_at_ms["f"] == 0
    assert 2_000 <= queue.came_at_ms["m"] <= 2_000 + 4_000
    assert queue.copies == {"m": 1, "f": 1}


def test_delays_grow_while_an_obstacle_stays(front: DelayProxy, queue: Queue, clock: ManualClock) -> None:
    publish(front, "missing", "m")

    pass_time(front, clock, 16_000)
    in_seconds = len(queue.requests)
    pass_time(front, clock, 3_600_000, step_ms=1_000)

    assert 4 <= in_seconds <= 6, "after 0, 1, 3, 7 and 15 seconds, or a quarter earlier"
    assert 60 / 5 <= len(queue.requests) - in_seconds <= 60 / 5 * 4 / 3 + 6, "every five minutes in the end"


def test_a_burst_above_what_a_queue_holds_drains_as_there_is_room(
    front: DelayProxy, queue: Queue, clock: ManualClock
) -> None:
    ids = [f"m{number}" for number in range(200)]
    publish(front, "small", *ids)

    for _ in range(40):
        queue.room["small"] = 10
        pass_time(front, clock, 1_000)

    assert queue.copies == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("place", [0, 10, 19], ids=["first", "middle", "last"])
def test_what_is_refused_for_good_stays_alone_with_its_reason_until_it_is_canceled(
    front: DelayProxy, queue: Queue, clock: ManualClock, place: int
) -> None:
    ids = [f"m{number}" for number in range(20)]
    poison = ids[place]
    queue.room.update({"t": 100, "u": 100})
    front.publish(
        [
            Message(id=one, topic="u" if number % 3 else "t", body=b"poison" if one == poison else b"x")
            for number, one in enumerate(ids)
        ]
    )

    pass_time(front, clock, 1_000)

    assert queue.copies == {one: 1 for one in ids if one != poison}
    found = front.scheduled_message(poison)
    assert found is not None
    assert found["refused"] == "rejected by the broker: the header CC is the broker's own"
    assert found["deliver_at_ms"] == NOW_MS + PARKED_AGAIN_MS
    metrics = BrokerMetrics(front.served, series_max=10).registry
    topic = str(found["topic"])
    assert metrics.get_sample_value("broker_delay_refused_messages_total", {"topic": topic}) == 1
    assert front.refused() == [RefusedMessage(id=poison, topic=topic, reason=str(found["refused"]))]
    before = len(queue.requests)
    pass_time(front, clock, PARKED_AGAIN_MS, step_ms=60_000)
    pass_time(front, clock, 2_000)
    assert len(queue.requests) == before, "tried again when somebody says so, not each hour"
    [again] = front.retry_refused([poison])
    assert (again.status, again.error) == ("refused", found["refused"])
    assert metrics.get_sample_value("broker_delay_refused_messages_total", {"topic": topic}) == 1
    assert front.cancel([poison]) == ["canceled"]
    pass_time(front, clock, PARKED_AGAIN_MS + 60_000, step_ms=60_000)
    assert (len(queue.requests), front.scheduled_message(poison)) == (before + 1, None)


def test_what_was_refused_for_good_is_sent_when_it_is_retried_after_a_restart_and_once(
    opened_front: Callable[[], DelayProxy], queue: Queue, clock: ManualClock
) -> None:
    front = opened_front()
    queue.room["t"] = 10
    publish(front, "t", "m", "poison", poison="poison")
    pass_time(front, clock, 1_000)
    front.close()
    front = opened_front()
    queue.takes_poison = True
    pass_time(front, clock, PARKED_AGAIN_MS, step_ms=60_000)
    pass_time(front, clock, 2_000)

    assert [refused.id for refused in front.refused()] == ["poison"], "its reason is durable"
    statuses = [outcome.status for outcome in front.retry_refused(["poison", "m", "nobody"])]
    pass_time(front, clock, PARKED_AGAIN_MS, step_ms=60_000)

    assert statuses == ["sent", "unknown", "unknown"]
    assert queue.copies == {"m": 1, "poison": 1}
    assert (front.refused(), front.scheduled_message("poison")) == ([], None)
    [repeat] = front.publish([Message(id="poison", topic="t", body=b"x")])
    assert repeat.status == "duplicate"


@pytest.mark.parametrize("turns", ["claimed", "put_off"])
def test_what_falls_due_again_while_the_target_takes_it_on_a_retry_is_sent_once_and_listed_no_more(
    front: DelayProxy, queue: Queue, clock: ManualClock, turns: str
) -> None:
    publish(front, "t", "poison", poison="poison")
    pass_time(front, clock, 1_000)
    queue.room["t"], queue.takes_poison = 10, True
    clock.advance(PARKED_AGAIN_MS - 1_000 - CLAIM_AHEAD_MS // 2)  # a shard claims ahead of the due time

    def fall_due() -> None:
        front.service.turn()
        if turns == "put_off":
            clock.advance(CLAIM_AHEAD_MS)
            front.service.turn()

    queue.meanwhile = fall_due
    [sent] = front.retry_refused(["poison"])
    queue.meanwhile = lambda: None
    pass_time(front, clock, 2_000)
    listed = front.refused()
    again = front.retry_refused(["poison"])
    pass_time(front, clock, 2 * PARKED_AGAIN_MS, step_ms=60_000)

    assert ([outcome.status for outcome in (sent, *again)], listed) == (["sent", "unknown"], [])
    assert (queue.copies, front.refused(), front.scheduled_message("poison")) == ({"poison": 1}, [], None)


def test_an_outage_at_a_retry_leaves_the_message_and_its_reason(
    front: DelayProxy, queue: Queue, clock: ManualClock
) -> None:
    publish(front, "t", "poison", poison="poison")
    pass_time(front, clock, 1_000)
    queue.takes_poison, queue.out_after = True, 0

    with pytest.raises(BrokerUnavailable):
        front.retry_refused(["poison"])

    assert [refused.id for refused in front.refused()] == ["poison"]
    queue.out_after = None
    [outcome] = front.retry_refused(["poison"])
    assert outcome.status == "deferred", "its queue has no room"
    queue.room["t"] = 1
    [outcome] = front.retry_refused(["poison"])
    assert outcome.status == "sent"


def test_what_was_taken_before_an_outage_is_not_sent_again_after_the_clock_stepped_back(
    front: DelayProxy, queue: Queue, clock: ManualClock
) -> None:
    front.publish([Message(id=f"m{ms}", topic="t", body=b"x", deliver_at_ms=NOW_MS + ms) for ms in (1_000, 2_000)])
    queue.room["t"], queue.in_doubt = 10, 1
    clock.advance(3_000)

    front.service.turn()
    clock.step_wall(-1_500)
    pass_time(front, clock, 10_000)

    assert queue.copies == {"m1000": 1, "m2000": 1}


def test_what_was_taken_before_an_outage_is_not_sent_again(front: DelayProxy, queue: Queue, clock: ManualClock) -> None:
    ids = [f"m{number}" for number in range(10)]
    queue.room["t"] = 100
    queue.out_after = 4
    publish(front, "t", *ids)

    pass_time(front, clock, 100)
    taken = dict(queue.copies)
    pass_time(front, clock, 2_000)
    queue.out_after = None
    pass_time(front, clock, 60_000)

    assert taken == dict.fromkeys(ids[:4], 1)
    assert queue.copies == dict.fromkeys(ids, 1)
    assert sum(count for _, count in front.lateness.counts()) == 10


def test_after_a_stop_in_an_outage_only_what_was_not_taken_comes(
    opened_front: Callable[[], DelayProxy], queue: Queue, clock: ManualClock
) -> None:
    front = opened_front()
    ids = [f"m{number}" for number in range(10)]
    queue.room["t"] = 100
    queue.out_after = 4
    publish(front, "t", *ids)
    while front.service.turn() == 0:
        pass
    front.close()
    queue.out_after = None

    pass_time(opened_front(), clock, 1_000)

    assert queue.copies == dict.fromkeys(ids, 1)
