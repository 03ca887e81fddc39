"""A broker of RocketMQ on a small disk that becomes full: it refuses messages, and keeps all that it acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from outbox_core.common.errors import BrokerError, StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message
from tests.broker_adapter.http.test_tls import certificate
from tests.engines.fault_conformance import is_taken
from tests.engines.jars import fetched_jars
from tests.engines.outbox_load import wait_for
from tests.engines.rocketmq.java_client import start_jvm
from tests.engines.rocketmq.rocketmq_cluster import HOST, RocketMqCluster
from tests.engines.rocketmq.rocketmq_engine import RocketMqEngine
from tests.outbox_broker.mounts import filled, small_disk

WAIT_SECONDS: Final = 300
DISK_MB: Final = 256
USED_SHARE: Final = 0.95
"""Above the nine tenths at which the broker counts its disk as full."""
FILES_BYTES: Final = 40_000_000
"""More than two files of its log, so that there is an oldest one that could be deleted."""
BODY: Final = b"x" * 1_000_000


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that a test can fill."""
    with small_disk(tmp_path_factory.mktemp("disk"), size_mb=DISK_MB) as place:
        yield place


@pytest.fixture(scope="module")
def small_engine(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMqEngine]:
    """Servers of its own, whose broker keeps its messages there."""
    folder = tmp_path_factory.mktemp("servers")
    jars = fetched_jars(Path(__file__).with_name("pom.xml"))
    start_jvm(jars=jars, home=folder / "client")
    cluster = RocketMqCluster(jars=jars, folder=folder, tls=certificate(folder, address=HOST), store=disk / "store")
    try:
        cluster.start()
        yield RocketMqEngine(cluster)
    finally:
        cluster.stop()


def test_a_full_disk_stores_nothing_and_deletes_nothing_and_with_room_messages_are_stored_again(
    small_engine: RocketMqEngine, disk: Path, topic: str
) -> None:
    small_engine.make_topic(topic)
    with closing(connect(small_engine.url)) as broker:
        first = [Message(id=f"m{n}", topic=topic, body=BODY) for n in range(FILES_BYTES // len(BODY))]
        for one in first:
            wait_for(partial(is_taken, broker, one))
        with filled(disk, share=USED_SHARE):
            refused = publish_until_refused(broker, topic)
        last = Message(id="last", topic=topic, body=b"x")
        wait_for(lambda: is_taken(broker, last))  # it looks at its disk once a second
        stored = {one.id for one in small_engine.read(topic, count=len(first) + 1)}

    assert "disk is full" in str(refused)
    assert "make room" in str(refused)
    assert stored >= {one.id for one in (*first, last)}


def test_a_broker_that_would_delete_messages_for_room_is_reported(small_engine: RocketMqEngine) -> None:
    cluster = small_engine.cluster
    with closing(connect(f"{small_engine.url}&timeout_ms=60000")) as broker:  # half of it is for what is asked
        assert isinstance(broker, Inspectable)
        sound = broker.inspect([])
        cluster.client.set_broker("cleanFileForciblyEnable", "true")
        weak = broker.inspect([])
        cluster.client.set_broker("cleanFileForciblyEnable", "false")

    assert sound.weaknesses == ()
    assert [one.cure.partition(":")[0] for one in weak.weaknesses] == ["set cleanFileForciblyEnable=false"]


def publish_until_refused(broker: Broker, topic: str) -> StorageFailed:
    """Small messages, until the broker has seen that its disk is full."""
    deadline, nothing = time.monotonic() + WAIT_SECONDS, threading.Event()
    number = 0
    while time.monotonic() < deadline:
        try:
            broker.publish([Message(id=f"small{number}", topic=topic, body=b"x")])
        except StorageFailed as refused:
            return refused
        except BrokerError:
            pass
        number += 1
        nothing.wait(0.1)
    raise TimeoutError("the broker never saw that its disk is full")
