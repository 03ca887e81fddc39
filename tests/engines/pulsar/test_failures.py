"""Pulsar paused, topics that take no message or keep none, and the end of clients and of the interpreter."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.record_sender import PulsarRecord, PulsarRecordSender
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import open_broker, with_option
from tests.engines.fault_conformance import is_taken
from tests.engines.outbox_load import wait_for
from tests.engines.pulsar.faulty_pulsar import FaultyPulsar
from tests.engines.pulsar.pulsar_engine import PulsarEngine
from tests.engines.recorded_broker import recorded_broker

__all__ = ["open_broker"]

Open = Callable[[str], Broker]
PROGRAM_SECONDS_MAX = 120
HANGING_MS = 2_000
STOOD_STILL_MS = 10_000
"""For how long the interpreter stood still, where the client's time-out of each message struck as the call ended."""
PROGRAM = """
import sys
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message
print(connect(sys.argv[1]).publish([Message(id="m-0", topic=sys.argv[2], body=b"")])[0].status)
"""
BUSY_PROGRAM = """
import sys, threading
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message
broker, begun = connect(sys.argv[1]), threading.Semaphore(0)
def publish():
    while True:
        broker.publish([Message(id=f"m-{number}", topic=sys.argv[2], body=b"") for number in range(400)])
        begun.release()
for _ in range(3):
    threading.Thread(target=publish, daemon=True).start()
    begun.acquire()
"""
BUSY_PROGRAMS = 6
"""Without an end of clients that waits for threads, five of eight aborted."""
LATE_PRODUCERS = 60
"""One of five was waited for without end, where its client was ended meanwhile."""


def message(topic: str, number: int, **parts: object) -> Message:
    """The message of a number."""
    return Message(id=f"m-{number}", topic=topic, **{"body": b"%d" % number, **parts})  # type: ignore[arg-type]


def record_sender(engine: PulsarEngine, *, timeout_ms: int) -> PulsarRecordSender:
    """A client of its own, to be closed."""
    return PulsarRecordSender(client_settings(engine, timeout_ms=timeout_ms), clock=SystemClock())


def record(engine: PulsarEngine, topic: str) -> PulsarRecord:
    """A message as the client takes it."""
    url = client_settings(engine, timeout_ms=HANGING_MS).topic_url(topic)
    return PulsarRecord(topic=url, key=None, body=b"", properties={}, event_timestamp_ms=None)


def client_settings(engine: PulsarEngine, *, timeout_ms: int) -> ClientSettings:
    """Those of the server's URL."""
    url = BrokerUrl.parse(f"pulsar://{engine.server.addresses}", port=engine.server.port)
    return ClientSettings.of(url, timeout_ms=timeout_ms)


def test_a_paused_server_is_unavailable_and_what_was_in_doubt_is_stored_when_it_is_repeated(
    own_engine: PulsarEngine, topic: str
) -> None:
    own_engine.make_topic(topic)
    in_doubt = Counter[str]()
    with closing(recorded_broker(own_engine.url, in_doubt, timeout_ms=2_000)) as broker:
        wait_for(lambda: is_taken(broker, message(topic, 0)))
        own_engine.server.pause()
        try:
            with pytest.raises(BrokerUnavailable):
                broker.publish([message(topic, number, key="k") for number in range(1, 11)])
        finally:
            own_engine.server.start()
        for number in range(1, 11):
            wait_for(partial(is_taken, broker, message(topic, number, key="k")))

    read = Counter(one.id for one in own_engine.read(topic, count=11))

    assert list(read) == [f"m-{number}" for number in range(11)]  # the first copy of each, in order
    assert min(in_doubt[f"m-{number}"] for number in range(1, 11)) > 0
    assert [one for one in read if read[one] > (1 + in_doubt[one]) * FaultyPulsar.copies_per_publish_max] == []


def test_a_client_whose_batch_a_paused_server_does_not_answer_ends_at_once(
    own_engine: PulsarEngine, topic: str
) -> None:
    own_engine.make_topic(topic)
    sender = record_sender(own_engine, timeout_ms=HANGING_MS)
    records, clock = [record(own_engine, topic)] * 400, SystemClock()
    sender.store(records, {}, deadline_ms=clock.monotonic_ms() + PROGRAM_SECONDS_MAX * 1_000)
    own_engine.server.pause()
    try:
        with pytest.raises(BrokerUnavailable):
            sender.store(records, {}, deadline_ms=clock.monotonic_ms() + HANGING_MS)
        begin_ms = clock.monotonic_ms()
        sender.close()
        took_ms = clock.monotonic_ms() - begin_ms
    finally:
        own_engine.server.start()

    assert took_ms < STOOD_STILL_MS / 2


def test_a_terminated_topic_takes_nothing_and_blocks_no_other(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    ended = f"{topic}.ended"
    engine.make_topic(topic)
    engine.make_topic(ended)
    broker = open_broker(engine.url)
    broker.publish([message(ended, 0)])
    engine.server.ask("POST", f"persistent/public/default/{ended}/terminate")

    for _ in range(2):  # by the producer that is there, and by a new one
        results = broker.publish([message(ended, 1), message(topic, 2), message(ended, 3)])

        assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED, PublishStatus.DEFERRED]
        assert "terminated" in str(results[0].error)


def test_strict_defers_messages_of_a_topic_without_a_subscription_until_it_has_one(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    engine.server.create_topic(topic)
    broker = open_broker(with_option(engine.url, "strict=true"))

    [refused] = broker.publish([message(topic, 0)])
    engine.server.create_subscription(topic, "plain")
    [stored] = broker.publish([message(topic, 0)])

    assert (refused.status, stored.status) == (PublishStatus.DEFERRED, PublishStatus.STORED)
    assert "create-subscription" in str(refused.error)


@pytest.mark.parametrize("hangs", [False, True], ids=["is down", "hangs"])
def test_an_admin_api_that_does_not_answer_stops_no_publish(
    engine: PulsarEngine, open_broker: Open, topic: str, hangs: bool
) -> None:
    engine.make_topic(topic)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"http://127.0.0.1:{silent.getsockname()[1] if hangs else 1}"
        [result] = open_broker(f"pulsar://{engine.server.addresses}?admin={admin}").publish([message(topic, 0)])

    assert result.status is PublishStatus.STORED
    assert [one.id for one in engine.read(topic, count=1)] == ["m-0"]


def test_a_namespace_whose_policy_confirms_one_copy_is_named(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    namespace = f"public/n{topic[2:]}"
    policy = {
        "bookkeeperEnsemble": 1,
        "bookkeeperWriteQuorum": 1,
        "bookkeeperAckQuorum": 1,
        "managedLedgerMaxMarkDeleteRate": 0.0,
    }
    engine.server.ask("PUT", f"namespaces/{namespace}")
    engine.server.ask("POST", f"namespaces/{namespace}/persistence", json=policy)
    server = engine.server
    broker = open_broker(f"pulsar://{server.addresses}/{namespace}?admin={server.admin_url}")
    assert isinstance(broker, Inspectable)

    weaknesses = broker.inspect([]).weaknesses

    assert [one.subject for one in weaknesses] == [namespace, namespace]
    assert "set bookkeeperAckQuorum to 2" in weaknesses[1].cure


def test_a_namespace_that_drops_what_nobody_has_read_is_named(
    engine: PulsarEngine, open_broker: Open, topic: str
) -> None:
    namespace, server = f"public/u{topic[2:]}", engine.server
    server.ask("PUT", f"namespaces/{namespace}")
    broker = open_broker(f"pulsar://{server.addresses}/{namespace}?admin={server.admin_url}")
    assert isinstance(broker, Inspectable)
    assert broker.inspect([]).weaknesses == ()

    quota = {"limitSize": 1_000_000, "limitTime": -1, "policy": "consumer_backlog_eviction"}
    server.ask("POST", f"namespaces/{namespace}/backlogQuota", json=quota)
    server.ask("POST", f"namespaces/{namespace}/messageTTL", json=3_600)

    wait_for(lambda: len(broker.inspect([]).weaknesses) == 2)


def test_a_program_that_closes_nothing_ends_well(engine: PulsarEngine, topic: str) -> None:
    engine.make_topic(topic)

    program = [sys.executable, "-c", PROGRAM, engine.url, topic]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PROGRAM_SECONDS_MAX)

    assert (ended.returncode, ended.stdout) == (0, "stored\n"), ended.stderr


def test_programs_whose_threads_publish_as_they_end_end_well(engine: PulsarEngine, topic: str) -> None:
    engine.make_topic(topic)
    program = [sys.executable, "-c", BUSY_PROGRAM, engine.url, topic]

    for _ in range(BUSY_PROGRAMS):
        ended = subprocess.run(program, capture_output=True, text=True, timeout=PROGRAM_SECONDS_MAX)

        assert ended.returncode == 0, ended.stderr


def test_producers_that_come_too_late_leave_no_thread_behind(
    engine: PulsarEngine, topic: str, random_seed: int
) -> None:
    engine.make_topic(topic)
    chosen, clock = random.Random(random_seed), SystemClock()
    before = set(threading.enumerate())

    for _ in range(LATE_PRODUCERS):
        sender = record_sender(engine, timeout_ms=5_000)
        with suppress(BrokerUnavailable):
            sender.store([record(engine, topic)], {}, deadline_ms=clock.monotonic_ms() + chosen.randrange(1, 16))
        sender.close()

    for thread in set(threading.enumerate()) - before:
        thread.join(PROGRAM_SECONDS_MAX)
    assert not set(threading.enumerate()) - before
