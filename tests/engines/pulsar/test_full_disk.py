"""A bookie of Pulsar on a small disk that becomes full: it takes nothing, and keeps all that was acknowledged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from outbox_core.common.errors import BrokerError, BrokerUnavailable, StorageFailed
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import with_option
from tests.engines.fault_conformance import is_taken
from tests.engines.outbox_load import wait_for
from tests.engines.pulsar.pulsar_engine import PulsarEngine
from tests.engines.pulsar.pulsar_server import PulsarServer
from tests.outbox_broker.mounts import filled, small_disk

WAIT_SECONDS: Final = 300
DISK_MB: Final = 512
USED_SHARE: Final = 0.97
"""Above the 95 % at which the bookie becomes read-only."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that a test can fill."""
    with small_disk(tmp_path, size_mb=DISK_MB) as place:
        yield place


@pytest.fixture
def small_engine(jars: Path, disk: Path, tmp_path: Path) -> Iterator[PulsarEngine]:
    """A server of its own, whose bookie keeps its messages there."""
    server = PulsarServer(jars=jars, folder=tmp_path, bookie_folder=disk / "bookkeeper")
    try:
        server.start()
        with PulsarEngine(server) as engine:
            yield engine
    finally:
        server.close()


def test_a_full_disk_takes_nothing_and_loses_nothing_and_with_room_messages_are_stored_again(
    small_engine: PulsarEngine, disk: Path, topic: str
) -> None:
    small_engine.make_topic(topic)
    with closing(connect(with_option(small_engine.url, "timeout_ms=3000"))) as broker:
        first = [Message(id=f"m{n}", topic=topic, body=b"x") for n in range(100)]
        for one in first:
            wait_for(partial(is_taken, broker, one))
        with filled(disk, share=USED_SHARE):
            more, refused = publish_until_refused(broker, topic)
        last = Message(id="last", topic=topic, body=b"x")
        wait_for(lambda: is_taken(broker, last))
        acknowledged = [*(one.id for one in first), *more, "last"]
        stored = {one.id for one in small_engine.read(topic, count=len(acknowledged))}

    assert isinstance(refused, StorageFailed | BrokerUnavailable)
    assert "bookies" in str(refused)
    assert set(acknowledged) - stored == set()


def publish_until_refused(broker: Broker, topic: str) -> tuple[list[str], BrokerError]:
    """The ids of the messages that were acknowledged until the bookie has seen that its disk is full, and the error."""
    stored: list[str] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        message = Message(id=f"more{len(stored)}", topic=topic, body=b"x")
        try:
            [result] = broker.publish([message])
        except BrokerError as refused:
            return stored, refused
        assert result.status is PublishStatus.STORED
        stored.append(message.id)
    raise TimeoutError("the bookie never saw that its disk is full")
