"""Too many open files: told as such, with its cure, and never as a full disk or as damage."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.log.disk_reserve import Reserve
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.failing_storage import FailingStorage

TOPIC, GROUP = "orders", "billing"
CURE = r"Too many open files.*allow the process more open files \(ulimit -n\)"
SMALL = {"segment_bytes": 4096, "checkpoint_bytes": 4096}
type_of_open = Callable[..., Engine]


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def publish(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x" * 500)])


def test_a_publish_that_finds_no_descriptor_for_a_new_segment_says_so(open_engine: type_of_open) -> None:
    disk = FailingStorage()
    engine = open_engine(storage=disk, **SMALL)
    disk.fail("create", errno.EMFILE)

    with pytest.raises(StorageFailed, match=CURE) as refused:
        publish(engine, 20)

    assert "disk space" not in str(refused.value)
    disk.mend()
    engine.publisher.publish([Message(id="after", topic=TOPIC, body=b"x")])


def test_acknowledgements_go_on_where_there_is_no_descriptor_for_a_new_segment(open_engine: type_of_open) -> None:
    disk = FailingStorage()
    engine = open_engine(storage=disk, **SMALL)
    engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=b"x") for number in range(200)])
    disk.fail("create", errno.EMFILE)

    for _ in range(200):
        [delivery] = engine.puller.pull(TOPIC, GROUP, max_messages=1)
        assert engine.settler.ack([delivery.receipt]) == ["acked"]

    assert engine.puller.pull(TOPIC, GROUP) == []


def test_the_reserve_says_why_it_cannot_be_taken(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", size_bytes=4096)

    with no_more_files(), pytest.raises(StorageFailed, match=CURE) as refused:
        reserve.require()

    assert "No space" not in str(refused.value)
    reserve.require()
    assert reserve.held_bytes == 4096


def test_a_footer_that_finds_no_descriptor_is_not_taken_for_damaged(
    open_engine: type_of_open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**SMALL)
    publish(engine, 40)
    caplog.set_level(logging.INFO)

    with no_more_files(), pytest.raises(StorageFailed, match=CURE):
        engine.puller.pull(TOPIC, GROUP)

    engine.check_ready()
    assert [one.id for one in engine.puller.pull(TOPIC, GROUP, max_messages=2)] == ["m0", "m1"]
    assert "segment_footer_made" not in map(event_name, caplog.records)
