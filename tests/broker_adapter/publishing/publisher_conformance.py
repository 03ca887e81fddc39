"""What every publisher to another broker does alike, on a real server of it.

A test module of an engine imports all of these tests and has a fixture `engine`: an EngineUnderTest.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from outbox_core.common.errors import BrokerUnavailable, NotAuthorized, NotSupported
from outbox_core.messages.broadcast_port import Broadcaster
from outbox_core.messages.broker_port import Broker, Capability, Inspectable, capabilities_of
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated
from tests.broker_adapter.publishing.engine_under_test import EngineUnderTest
from tests.broker_adapter.publishing.forking_program import PUBLISHED, publish_across_fork
from tests.engines.outbox_load import wait_for
from tests.fixtures.cutting_tcp_proxy import THREADS as PROXY_THREADS
from tests.fixtures.forks import FORK_IDS

YEAR_MS = 365 * 24 * 3_600_000
WAIT_SECONDS = 300
STORED = {PublishStatus.STORED, PublishStatus.DUPLICATE}


@pytest.fixture
def open_broker() -> Iterator[Callable[[str], Broker]]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def opened(url: str) -> Broker:
            broker = connect(url)
            stack.callback(broker.close)
            return broker

        yield opened


@pytest.fixture
def foreign(engine: EngineUnderTest, open_broker: Callable[[str], Broker]) -> Broker:
    """The adapter on the engine's server."""
    return open_broker(engine.url)


@pytest.fixture
def made_topic(engine: EngineUnderTest) -> str:
    """A topic of the test's own that is there."""
    topic = f"t.{uuid.uuid4().hex}"
    engine.make_topic(topic)
    return topic


def message(topic: str, number: int, **parts: object) -> Message:
    """The message of a number."""
    fields = {"id": f"{topic[-8:]}-{number:05d}", "topic": topic, "body": str(number).encode(), **parts}
    return Message(**fields)  # type: ignore[arg-type]


def with_option(url: str, option: str) -> str:
    """The URL with one more option."""
    return f"{url}{'&' if '?' in url else '?'}{option}"


def test_a_batch_is_read_by_the_plain_client_with_all_its_parts_in_order(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    headers = {"content-type": "application/json", "Trace-Colour": "grün", "empty": ""}
    batch = [
        message(made_topic, n, key=f"k{n % 3}", headers=headers, created_at_ms=1_700_000_000_123) for n in range(50)
    ]

    results = foreign.publish(batch)
    read = engine.read(made_topic, count=50)

    assert [(one.id, one.status) for one in results] == [(one.id, PublishStatus.STORED) for one in batch]
    assert [(one.id, one.key, one.body, one.content_type) for one in read] == [
        (one.id, one.key, one.body, "application/json") for one in batch
    ]
    assert all(one.headers.items() >= {"Trace-Colour": "grün", "empty": ""}.items() for one in read)
    assert all(one.headers["outbox-id"] == one.id for one in read)
    assert {one.headers["outbox-created-at-ms"] for one in read} == {"1700000000123"}


@pytest.mark.parametrize("body", [b"", b"\x00\xff\xfe not text", b"x" * 900_000], ids=["empty", "bytes", "900 kB"])
def test_any_body_arrives_byte_for_byte(engine: EngineUnderTest, foreign: Broker, made_topic: str, body: bytes) -> None:
    [result] = foreign.publish([message(made_topic, 0, body=body)])
    [read] = engine.read(made_topic, count=1)

    assert (result.status, read.body, read.key, read.content_type) == (PublishStatus.STORED, body, None, None)


def test_attributes_of_an_event_stand_where_the_engines_cloudevents_binding_has_them(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    headers = {"ce-id": "e-1", "ce-specversion": "1.0", "ce-source": "/shop", "ce-type": "paid"}

    foreign.publish([message(made_topic, 0, headers=headers)])
    [read] = engine.read(made_topic, count=1)

    prefix = engine.attribute_prefix
    expected = {
        f"{prefix}id": "e-1",
        f"{prefix}specversion": "1.0",
        f"{prefix}source": "/shop",
        f"{prefix}type": "paid",
    }
    assert read.headers.items() >= expected.items()


def test_a_topic_that_is_not_there_is_deferred_or_made_and_the_others_are_stored(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    missing = f"missing.{uuid.uuid4().hex}"

    results = foreign.publish([message(made_topic, 0), message(missing, 0), message(made_topic, 1)])

    middle = PublishStatus.STORED if engine.makes_topics else PublishStatus.DEFERRED
    assert [one.status for one in results] == [PublishStatus.STORED, middle, PublishStatus.STORED]
    assert engine.makes_topics or missing in str(results[1].error)
    assert [one.body for one in engine.read(made_topic, count=2)] == [b"0", b"1"]


def test_a_message_that_is_too_large_is_rejected_and_the_others_are_stored(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    if engine.too_large_bytes is None:
        pytest.skip("this engine takes every body that a message may have")
    large = message(made_topic, 1, body=b"x" * engine.too_large_bytes)

    published = publish_isolated(foreign.publish, [message(made_topic, 0), large, message(made_topic, 2)])

    results = [published.results[place] for place in range(3)]
    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.STORED]
    assert "large" in str(results[1].error) or "size" in str(results[1].error)
    # They have no key, so either may come first: RocketMQ's go again beside each other.
    assert sorted(one.body for one in engine.read(made_topic, count=2)) == [b"0", b"2"]
    assert foreign.publish([message(made_topic, 3)])[0].status in STORED


@pytest.mark.parametrize("place", [0, 4, 8], ids=["first", "middle", "last"])
def test_a_poisonous_message_is_refused_alone_and_its_neighbours_are_stored_once(
    engine: EngineUnderTest, foreign: Broker, made_topic: str, place: int
) -> None:
    poisons = engine.poisons(made_topic)
    assert poisons, "each engine refuses something"
    expected: Counter[tuple[str, str]] = Counter()
    for number, poison in enumerate(poisons):
        beside = poison.beside or poison.topic
        batch = [
            message(made_topic if at % 2 else beside, 100 * number + at, key=f"k{at}", body=b"sound") for at in range(9)
        ]
        parts = {"body": b"poison", **poison.parts}
        batch[place] = message(poison.topic, 100 * number + place, **parts)

        published = publish_isolated(foreign.publish, batch)

        assert published.outage is None, poison
        result = published.results[place]
        assert result.status is poison.status, (poison, result)
        assert poison.says.lower() in str(result.error).lower()
        neighbours = [one for one in batch if one is not batch[place]]
        refused = {
            one.id: published.results[at]
            for at, one in enumerate(batch)
            if at != place and published.results[at].status is not PublishStatus.STORED
        }
        assert refused == {}, poison
        expected.update((one.topic, one.id) for one in neighbours)
    stored: Counter[tuple[str, str]] = Counter()
    for topic in {topic for topic, _ in expected}:
        of_topic = [one for one in expected if one[0] == topic]
        stored.update((topic, one.id) for one in engine.read(topic, count=len(of_topic)))
    assert stored == expected


def test_threads_share_a_broker_and_each_keeps_its_order(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    def publish(first: int) -> None:
        for start in range(first, first + 200, 50):
            results = foreign.publish([message(made_topic, n) for n in range(start, start + 50)])
            assert {one.status for one in results} == {PublishStatus.STORED}

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(publish, first) for first in (0, 1_000, 2_000, 3_000)]:
            done.result(WAIT_SECONDS)
    read = [int(one.body) for one in engine.read(made_topic, count=800)]

    assert len(read) == 800
    for first in (0, 1_000, 2_000, 3_000):
        assert [n for n in read if first <= n < first + 1_000] == list(range(first, first + 200))


def test_whatever_is_not_declared_raises_not_supported(foreign: Broker, made_topic: str) -> None:
    capabilities = capabilities_of(foreign)
    operations: dict[Capability, list[Callable[[], object]]] = {
        Capability.CANCEL: [lambda: foreign.cancel(["some-id"])],
        Capability.PULL: [
            lambda: foreign.pull(made_topic, "g"),
            lambda: foreign.ack(["r"]),
            lambda: foreign.nack(["r"]),
            lambda: foreign.extend(["r"], invisible_ms=1_000),
        ],
        Capability.ADMIN: [lambda: foreign.admin],
    }

    for capability, calls in operations.items():
        for call in calls if capability not in capabilities else []:
            with pytest.raises(NotSupported):
                call()
    assert isinstance(foreign, Broadcaster) == (Capability.BROADCAST in capabilities)


def test_a_scheduled_message_is_rejected_with_the_cure_where_the_engine_does_not_delay(
    engine: EngineUnderTest, foreign: Broker, made_topic: str
) -> None:
    if Capability.DELAY in capabilities_of(foreign):
        pytest.skip("this adapter delays")
    later = message(made_topic, 1, deliver_at_ms=1_700_000_000_000 + 100 * YEAR_MS)
    past = message(made_topic, 2, deliver_at_ms=1_700_000_000_000)

    results = foreign.publish([message(made_topic, 0), later, past])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.STORED]
    assert "?delay=" in str(results[1].error)
    assert [one.body for one in engine.read(made_topic, count=2)] == [b"0", b"2"]


def test_a_login_that_is_refused_is_not_authorized_and_named(
    engine: EngineUnderTest, open_broker: Callable[[str], Broker], made_topic: str
) -> None:
    if engine.wrong_password_url is None:
        pytest.skip("this server knows no logins")
    broker = open_broker(with_option(engine.wrong_password_url, "timeout_ms=20000"))

    with pytest.raises(NotAuthorized) as raised:
        broker.publish([message(made_topic, 0)])

    assert "wrong-password" not in str(raised.value)


def test_the_server_is_inspected_and_a_well_set_one_shows_no_weakness(foreign: Broker, made_topic: str) -> None:
    assert isinstance(foreign, Inspectable)

    inspection = foreign.inspect([made_topic])

    assert inspection.weaknesses == ()
    assert (inspection.product != "", inspection.version != "") == (True, True)


def test_close_is_idempotent_and_ends_all_threads(engine: EngineUnderTest, made_topic: str) -> None:
    before = threads()
    broker = connect(engine.url)
    broker.publish([message(made_topic, 0)])

    broker.close()
    broker.close()

    wait_for(lambda: threads() <= before)


def threads() -> int:
    """How many run in this process, without those of the proxies between a cluster's servers."""
    return sum(thread.name != PROXY_THREADS for thread in threading.enumerate())


@pytest.mark.processes
@pytest.mark.parametrize("fork", FORK_IDS)
def test_a_forked_child_publishes_by_a_connection_of_its_own_and_its_parent_keeps_its_own(
    engine: EngineUnderTest, made_topic: str, fork: str
) -> None:
    publish_across_fork(engine.url, made_topic, fork=fork)

    assert sorted(one.body.decode() for one in engine.read(made_topic, count=len(PUBLISHED))) == PUBLISHED


def test_a_killed_server_is_unavailable_in_time_and_what_it_acknowledged_is_there_after_its_restart(
    own_engine: EngineUnderTest, open_broker: Callable[[str], Broker]
) -> None:
    topic = f"t.{uuid.uuid4().hex}"
    own_engine.make_topic(topic)
    broker = open_broker(with_option(own_engine.url, "timeout_ms=3000"))
    acknowledged: list[str] = []

    for number in range(100):
        publish_until_stored(broker, message(topic, number))
        acknowledged.append(message(topic, number).id)
    own_engine.kill()
    with pytest.raises(BrokerUnavailable):
        broker.publish([message(topic, 100)])
    own_engine.start()
    publish_until_stored(broker, message(topic, 101))

    read = [one.id for one in own_engine.read(topic, count=101)]
    assert [one for one in acknowledged if one not in read] == []
    assert message(topic, 101).id in read


def publish_until_stored(broker: Broker, one: Message) -> None:
    """As the compensator does: again, until the broker has it."""

    def is_stored() -> bool:
        with suppress(BrokerUnavailable):
            return broker.publish([one])[0].status in STORED
        return False

    wait_for(is_stored)
