"""What is special about the timer store as a Broker: its slots, its bounds, and what it refuses."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from broker_adapter import redis as redis_adapter
from broker_adapter.redis.timers.slot_scripts import slot_of
from outbox_core.common.clock import ManualClock, SystemClock
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotSupported, StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import INVISIBLE_MS_MIN
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishStatus,
)
from tests.broker_adapter.redis.redis_engine import BULK_BYTES_MAX
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, replica_of, wait_until

Open = Callable[[str], Broker]
WAIT_MS = 60_000
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """A server that tests share; they keep apart by their topics."""
    with redis_server() as running:
        yield running


def url_of(server: RedisServer, options: str = "") -> str:
    return f"redis://{HOST}:{server.port}/?store=timers&wait=0{options}"


def message(topic: str, *, delay_ms: int = 0) -> Message:
    deliver_at_ms = time.time_ns() // 1_000_000 + delay_ms if delay_ms else None
    return Message(id=new_message_id(), topic=topic, body=b"x" * 100, deliver_at_ms=deliver_at_ms)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ("store=timers&slots=3", "power of two"),
        ("store=timers&slots=2048", "power of two"),
        ("slots=4", "about timers"),
        ("store=timers&maxlen=10", "about streams"),
        ("store=tables", "streams, timers"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_cure(options: str, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=cure):
        connect(f"redis://h/?{options}")


def test_another_number_of_slots_than_the_topic_has_stores_nothing(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    first, second = open_broker(url_of(shared, "&slots=4")), open_broker(url_of(shared, "&slots=8"))
    first.publish([message(topic)])

    with pytest.raises(StorageFailed, match="4 slots"):
        second.publish([message(topic)])

    assert open_broker(url_of(shared)).admin.figures(topic)["stored"] == 1


def test_a_cancel_by_a_url_that_says_slots_reaches_topics_that_have_another_number(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    other, mine = open_broker(url_of(shared)), open_broker(url_of(shared, "&slots=8"))
    of_other, of_mine = message(f"{topic}.other", delay_ms=HOUR_MS), message(topic, delay_ms=HOUR_MS)
    other.publish([of_other])
    mine.publish([of_mine])

    assert mine.cancel([of_mine.id, of_other.id]) == [CancelStatus.CANCELED] * 2

    assert [other.admin.figures(name)["scheduled"] for name in (topic, f"{topic}.other")] == [0, 0]


def test_an_id_that_was_canceled_before_it_came_is_dropped_on_a_topic_that_there_is(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared))
    broker.publish([message(topic)])
    canceled, kept = message(topic, delay_ms=50), message(topic)

    assert broker.cancel([canceled.id]) == [CancelStatus.UNKNOWN]
    assert [one.status for one in broker.publish([canceled, kept])] == [PublishStatus.STORED] * 2

    assert broker.admin.figures(topic)["scheduled"] == 0
    assert broker.admin.figures(topic)["stored"] == 2
    assert broker.cancel([canceled.id]) == [CancelStatus.CANCELED]


@pytest.mark.slow
def test_an_id_counts_as_new_when_the_window_of_its_cancel_is_over(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared, "&window_ms=1000"))
    scheduled, now = message(topic, delay_ms=HOUR_MS), message(topic)
    broker.publish([scheduled])
    broker.cancel([scheduled.id, now.id])
    canceled = time.monotonic()

    assert wait_until(lambda: time.monotonic() > canceled + 1.1)
    again = structs.replace(now, id=scheduled.id)
    assert [one.status for one in broker.publish([again, now])] == [PublishStatus.STORED] * 2
    assert [one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)] == [again.id, now.id]
    assert broker.cancel([again.id, now.id]) == [CancelStatus.TOO_LATE] * 2


@pytest.mark.slow
def test_a_cancel_that_no_replica_has_is_not_acknowledged_nor_is_its_repeat(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    with replica_of(server) as replica:
        url = f"redis://{HOST}:{server.port}/?store=timers&wait=1"
        patient = open_broker(f"{url}&timeout_ms=60000")
        first, second = [open_broker(f"{url}&timeout_ms=3000") for _ in range(2)]
        scheduled, unknown = message(topic, delay_ms=HOUR_MS), new_message_id()
        patient.publish([scheduled])

        with replica.paused():
            for one in (first, second):  # the repeat is on a connection that wrote nothing itself
                for message_id in (scheduled.id, unknown):
                    with pytest.raises(StorageFailed, match="0 of 1 replicas"):
                        one.cancel([message_id])

        assert patient.cancel([scheduled.id, unknown]) == [CancelStatus.CANCELED, CancelStatus.UNKNOWN]


def test_what_every_group_acknowledged_leaves_only_its_id_behind(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared))
    broker.publish([message(topic) for _ in range(10)])
    pulled = [broker.pull(topic, group) for group in ("g", "h")]
    for deliveries in pulled:
        assert broker.ack([one.receipt for one in deliveries]) == [AckStatus.ACKED] * 10

    left = {key.decode().rpartition("}:")[2] for key in shared.ask("KEYS", f"outbox:timers:{{{topic}:0}}:*")}

    assert left == {"meta", "ids", "group:g:config", "group:h:config"}


def test_a_group_with_a_filter_or_an_order_by_key_and_a_seek_are_not_supported(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    admin = open_broker(url_of(shared)).admin

    for config in (GroupConfig(filter="a = 1"), GroupConfig(ordered=True)):
        with pytest.raises(NotSupported):
            admin.declare_group(topic, "g", config)
    with pytest.raises(NotSupported):
        admin.seek(topic, "g", to_ms=0)


def test_a_full_server_refuses_what_comes_and_goes_on_to_deliver_and_to_settle(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(server))
    due, canceled = [message(topic) for _ in range(100)], message(topic, delay_ms=3_600_000)
    broker.publish([*due, canceled])
    server.ask("CONFIG", "SET", "maxmemory", "1")

    with pytest.raises(StorageFailed):
        broker.publish([message(topic)])
    assert broker.cancel([canceled.id]) == [CancelStatus.CANCELED]
    consumer = open_broker(url_of(server))  # of a process that begins now
    deliveries = consumer.pull(topic, "g", max_messages=100, wait_ms=WAIT_MS)

    assert [one.id for one in deliveries] == [one.id for one in due]
    assert consumer.ack([one.receipt for one in deliveries]) == [AckStatus.ACKED] * 100


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_is_refused_until_it_is_set_right(
    server: RedisServer, open_broker: Open, topic: str, policy: str
) -> None:
    broker = open_broker(url_of(server))
    server.ask("CONFIG", "SET", "maxmemory", "1gb")
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)

    for _ in range(2):
        with pytest.raises(StorageFailed, match=f"maxmemory-policy {policy} evicts all messages of a slot"):
            broker.publish([message(topic)])

    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert [one.status for one in broker.publish([message(topic)])] == [PublishStatus.STORED]


def test_a_server_whose_clock_is_ahead_delivers_nothing_early(shared: RedisServer, topic: str) -> None:
    clock = ManualClock(time.time_ns() // 1_000_000 - HOUR_MS)
    broker = redis_adapter.open_broker(url_of(shared), clock=clock)
    later = Message(id=new_message_id(), topic=topic, body=b"", deliver_at_ms=clock.now_ms() + HOUR_MS // 2)
    now = message(topic)
    broker.publish([later, now])

    assert [one.id for one in broker.pull(topic, "g")] == [now.id]
    assert broker.admin.figures(topic)["scheduled"] == 1
    clock.step_wall(HOUR_MS // 2 - 1)
    assert broker.pull(topic, "g") == []
    clock.step_wall(2)  # within a call, messages due at the same time are microseconds apart
    assert [one.id for one in broker.pull(topic, "g")] == [later.id]
    broker.close()


@pytest.mark.parametrize(
    ("clock_ms", "problem"), [(-HOUR_MS, "3,6.* s ahead of this machine's"), (HOUR_MS, "s behind"), (0, None)]
)
def test_a_clock_that_differs_is_a_weakness_that_is_named(
    shared: RedisServer, clock_ms: int, problem: str | None
) -> None:
    clock = ManualClock(time.time_ns() // 1_000_000 + clock_ms) if clock_ms else SystemClock()
    broker = redis_adapter.open_broker(url_of(shared), clock=clock)
    assert isinstance(broker, Inspectable)

    found = broker.inspect().weaknesses
    broker.close()

    if problem is None:
        assert found == ()
    else:
        [weakness] = found
        assert re.search(problem, weakness.problem)
        assert "NTP" in weakness.cure


@pytest.mark.parametrize("name", ["meta", "store", "log", "body", "ids", "canceled", "acks"])
def test_a_key_of_somebody_else_stores_nothing_and_what_was_deferred_comes_once_it_is_gone(
    shared: RedisServer, open_broker: Open, topic: str, name: str
) -> None:
    broker, key = open_broker(url_of(shared)), f"outbox:timers:{{{topic}:0}}:{name}"
    batch = [message(topic), message(topic, delay_ms=HOUR_MS)]
    shared.ask("SET", key, "of somebody else")

    results = broker.publish(batch)
    assert [one.status for one in results] == [PublishStatus.DEFERRED] * 2
    assert "WRONGTYPE" in (results[0].error or "")
    assert shared.ask("KEYS", f"outbox:timers:{{{topic}:0}}:*") == [key.encode()]

    shared.ask("DEL", key)
    assert [one.status for one in broker.publish(batch)] == [PublishStatus.STORED] * 2
    assert [one.id for one in broker.pull(topic, "g")] == [batch[0].id]
    assert broker.cancel([batch[1].id]) == [CancelStatus.CANCELED]


@pytest.mark.parametrize("name", ["retry", "prepare", "dead", "state"])
def test_a_key_of_somebody_else_moves_no_delivery_until_it_is_gone(
    shared: RedisServer, open_broker: Open, topic: str, name: str
) -> None:
    broker, key = open_broker(url_of(shared)), f"outbox:timers:{{{topic}:0}}:group:g:{name}"
    broker.publish([message(topic), message(topic)])
    [first] = broker.pull(topic, "g", max_messages=1)
    held = {one: shared.ask("DUMP", one) for one in shared.ask("KEYS", f"outbox:timers:{{{topic}:0}}:*")}
    if key.encode() in held:
        shared.ask("RENAME", key, f"{key}:aside")
    shared.ask("SET", key, "of somebody else")

    for move in (
        lambda: broker.pull(topic, "g"),
        lambda: broker.ack([first.receipt]),
        lambda: broker.nack([first.receipt], delay_ms=0),
    ):
        with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
            move()

    shared.ask("DEL", key)
    if key.encode() in held:
        shared.ask("RENAME", f"{key}:aside", key)
    assert {one: shared.ask("DUMP", one) for one in shared.ask("KEYS", f"outbox:timers:{{{topic}:0}}:*")} == held
    assert broker.nack([first.receipt], delay_ms=0) == [NackStatus.REQUEUED]
    pulled = broker.pull(topic, "g", wait_ms=WAIT_MS)
    assert broker.ack([one.receipt for one in pulled]) == [AckStatus.ACKED] * 2


def test_a_body_that_does_not_fit_with_its_headers_is_rejected_and_no_other(open_broker: Open, topic: str) -> None:
    with redis_server(proto_max_bulk_len=str(BULK_BYTES_MAX)) as small:
        broker = open_broker(url_of(small))
        of_bytes = [BULK_BYTES_MAX - 60, BULK_BYTES_MAX - 300, 1]
        batch = [
            Message(id=new_message_id(), topic=topic, body=b"x" * count, headers={"trace": "1" * 60})
            for count in of_bytes
        ]

        assert [one.status for one in broker.publish(batch)] == [
            PublishStatus.REJECTED, PublishStatus.STORED, PublishStatus.STORED,
        ]  # fmt: skip
        assert {one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)} == {one.id for one in batch[1:]}


def test_the_rights_that_the_guide_lists_are_enough(server: RedisServer, open_broker: Open, topic: str) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "brokers" / "redis.md").read_text(encoding="utf-8")
    rights = re.findall(r"^ACL SETUSER .*?^```", guide, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"\+[a-z|]+", " ".join(rights))
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:*", "&outbox:*", "-@all", *commands)
    broker = open_broker(url_of(server, "&slots=2").replace("redis://", "redis://app:word@"))

    canceled = message(topic, delay_ms=HOUR_MS)
    broker.publish([message(topic), message(topic), canceled])
    assert broker.cancel([canceled.id]) == [CancelStatus.CANCELED]
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    [first, second] = broker.pull(topic, "g", wait_ms=WAIT_MS)
    assert broker.extend([first.receipt], invisible_ms=60_000) == [ExtendStatus.EXTENDED]
    assert broker.ack([first.receipt]) == [AckStatus.ACKED]
    assert broker.nack([second.receipt]) == [NackStatus.DEAD]
    [dead], _ = broker.admin.dead(topic, "g")
    assert dead.id == second.id
    assert broker.admin.redrive(topic, "g") == 1
    broker.admin.pause(topic, "g", paused=True)
    assert broker.admin.figures(topic, "g")["stored"] == 2
    assert broker.admin.topics() == [topic]


@pytest.mark.slow
def test_a_pull_that_waits_asks_little_and_is_woken_by_what_is_due_before_all_others(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    """The long sleep is IDLE_MS; a wake-up ends it, and so does the next due time."""
    producer, consumer = open_broker(url_of(server, "&slots=8")), open_broker(url_of(server, "&slots=8"))
    producer.publish([message(topic, delay_ms=HOUR_MS) for _ in range(64)])
    consumer.pull(topic, "g", wait_ms=1)
    found: list[str] = []

    def pull_two() -> None:
        while len(found) < 2:
            found.extend(one.id for one in consumer.pull(topic, "g", wait_ms=WAIT_MS))

    waiting = threading.Thread(target=pull_two, daemon=True)
    waiting.start()
    assert wait_until(lambda: server.ask("PUBSUB", "NUMSUB", f"outbox:timers:wake:{topic}")[1] == 1)
    server.ask("CONFIG", "RESETSTAT")
    began, idle = time.monotonic(), threading.Event()
    idle.wait(2)
    counted, seconds = calls_of(server), time.monotonic() - began
    due, soon = message(topic), message(topic, delay_ms=300)
    producer.publish([soon])
    producer.publish([due])
    waiting.join(WAIT_MS / 1_000)

    assert sorted(found) == sorted([due.id, soon.id])
    assert counted <= 3 * 8 * (seconds + 3), "each slot is asked once a second or so, by three calls"


def test_a_user_without_the_right_to_wake_ups_publishes_and_consumes(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:*", "resetchannels", "+@all", "-subscribe", "-publish")
    broker = open_broker(url_of(server).replace("redis://", "redis://app:word@"))
    soon = message(topic, delay_ms=100)
    broker.publish([soon])

    assert [one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)] == [soon.id]
    late = message(topic)
    waiting = threading.Thread(
        target=lambda: pulled.extend(one.id for one in broker.pull(topic, "g", wait_ms=WAIT_MS)), daemon=True
    )
    pulled: list[str] = []
    waiting.start()
    broker.publish([late])
    waiting.join(WAIT_MS / 1_000)
    assert pulled == [late.id]


def test_pulls_of_many_threads_share_one_connection_for_wake_ups_and_end_with_the_broker(
    server: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(server))
    broker.publish([message(topic, delay_ms=HOUR_MS)])

    def pull_until_closed() -> None:
        with contextlib.suppress(ConfigurationError):  # of a pull that was about to ask
            assert broker.pull(topic, "g", wait_ms=WAIT_MS) == []

    pulls = [threading.Thread(target=pull_until_closed, daemon=True) for _ in range(8)]
    for pull in pulls:
        pull.start()
    assert wait_until(lambda: server.ask("PUBSUB", "NUMSUB", f"outbox:timers:wake:{topic}")[1] == 1)

    broker.close()
    for pull in pulls:
        pull.join(WAIT_MS / 1_000)
        assert not pull.is_alive()


def calls_of(server: RedisServer) -> int:
    """How many scripts the server was sent."""
    found = re.findall(r"cmdstat_eval(?:sha)?:calls=(\d+)", server.ask("INFO", "commandstats").decode())
    return sum(map(int, found))


def test_more_messages_than_a_millisecond_has_places_keep_the_order_of_their_publishes(shared: RedisServer) -> None:
    # Ids that sort the other way: sets order equal scores by id.
    sent = [f"{9_999 - number:04}" for number in range(4_500)]
    with contextlib.closing(connect(url_of(shared))) as broker:
        for lead_ms in (6_000, 60_000):  # a busy machine may not publish all before the first due time
            topic, due_ms = f"t.{new_message_id()}", time.time_ns() // 1_000_000 + lead_ms
            for first in range(0, len(sent), 500):
                broker.publish(
                    [Message(id=one, topic=topic, body=b"x", deliver_at_ms=due_ms) for one in sent[first : first + 500]]
                )
            if time.time_ns() // 1_000_000 < due_ms:
                break

        pulled: list[str] = []
        while len(pulled) < len(sent):
            deliveries = broker.pull(topic, "g", max_messages=1_000, wait_ms=WAIT_MS)
            broker.ack([delivery.receipt for delivery in deliveries])
            pulled += [delivery.id for delivery in deliveries]

        assert pulled == sent


def test_one_message_of_each_of_many_slots_is_not_alone_and_the_one_that_ends_its_consumers_dies_alone(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared, "&slots=8"))
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=2))
    ids = [next(one for one in (f"m{number}-{slot}" for number in range(1_000)) if slot_of(one, 8) == slot)
           for slot in range(8)]  # fmt: skip
    poison, *innocents = ids
    broker.publish([Message(id=one, topic=topic, body=b"x") for one in ids])
    handled: set[str] = set()
    attempts: dict[str, int] = {}

    for _ in range(100):
        pulled = broker.pull(topic, "g", wait_ms=100, invisible_ms=INVISIBLE_MS_MIN)
        if any(delivery.id == poison for delivery in pulled):
            assert wait_until(lambda: broker.admin.figures(topic, "g")["in_flight"] == 0)
            continue
        attempts |= {delivery.id: delivery.attempt for delivery in pulled}
        handled |= {delivery.id for delivery in pulled}
        broker.ack([delivery.receipt for delivery in pulled])
        if handled == set(innocents) and broker.admin.dead(topic, "g")[0]:
            break

    assert handled == set(innocents)
    assert [letter.id for letter in broker.admin.dead(topic, "g")[0]] == [poison]
    assert set(attempts.values()) == {1}, "an innocent was charged"


def test_what_is_published_for_now_comes_behind_what_was_due_before_and_nobody_pulled(
    shared: RedisServer, open_broker: Open, topic: str
) -> None:
    broker = open_broker(url_of(shared))
    broker.admin.declare_group(topic, "g", GroupConfig())
    due_ms = time.time_ns() // 1_000_000 + 200
    dues = [due_ms, due_ms + 1, due_ms + 2, due_ms + 10, None]
    ids = [new_message_id() for _ in dues]
    batch = [Message(id=one, topic=topic, body=b"x", deliver_at_ms=due) for one, due in zip(ids, dues, strict=True)]
    broker.publish(batch[:3])
    assert wait_until(lambda: time.time_ns() // 1_000_000 > due_ms + 50)
    broker.publish(batch[3:])

    assert [delivery.id for delivery in broker.pull(topic, "g", wait_ms=WAIT_MS)] == ids


def test_a_repeat_is_known_for_the_window_after_the_acknowledgement_however_long_the_message_waited(
    shared: RedisServer,
) -> None:
    topic, window_ms = f"t.{new_message_id()}", 1_000
    with contextlib.closing(connect(url_of(shared, f"&window_ms={window_ms}"))) as broker:
        due_ms = time.time_ns() // 1_000_000 + 3 * window_ms
        scheduled = Message(id="a", topic=topic, body=b"x", deliver_at_ms=due_ms)
        broker.publish([scheduled])
        broker.publish([message(topic)])  # as other publishes do, it forgets ids that are older than the window
        [other] = broker.pull(topic, "g", wait_ms=WAIT_MS)
        broker.ack([other.receipt])
        [delivery] = broker.pull(topic, "g", wait_ms=WAIT_MS)
        broker.publish([message(topic)])

        assert broker.ack([delivery.receipt]) == [AckStatus.ACKED]
        [again] = broker.publish([scheduled])

        assert again.status == PublishStatus.DUPLICATE
