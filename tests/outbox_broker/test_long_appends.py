"""Long appends, which are written piece by piece: they are whole or not there, wherever they fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.engine.engine import Engine
from outbox_broker.log.frame_batching import PIECE_BYTES
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import Frame, SegmentKind
from outbox_core.messages.message import Message
from tests.outbox_broker.failing_storage import FailingStorage

PAYLOADS = [b"\x91" + bytes([number]) * (PIECE_BYTES // 2) for number in range(10)]
type_of_open = Callable[..., tuple[SegmentedLog, list[bytes]]]


@pytest.fixture
def storage() -> FailingStorage:
    """The disk of this test's log."""
    return FailingStorage()


@pytest.fixture
def open_log(tmp_path: Path, storage: FailingStorage) -> Iterator[type_of_open]:
    """Open the log of this test; returns it and the payloads that it recovered."""
    with ExitStack() as stack:

        def opened() -> tuple[SegmentedLog, list[bytes]]:
            stack.close()
            log = SegmentedLog(
                tmp_path / "log", kind=SegmentKind.MESSAGES, segment_bytes=1 << 30, durability=Durability.FSYNC,
                storage=storage, now_ms=lambda: 1_800_000_000_000,
            )  # fmt: skip
            stack.callback(log.sync_and_close)
            return log, [one.payload for one in log.recover() if isinstance(one, Frame)]

        yield opened


def fail_at(storage: FailingStorage, number: int) -> None:
    """Have the so-manieth write from now on find no room."""
    left = number

    def before(call: str) -> None:
        nonlocal left
        left -= call == "write"
        if call == "write" and left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.before = before


def test_a_long_append_is_several_writes_and_reads_as_it_was_written(
    open_log: type_of_open, storage: FailingStorage
) -> None:
    log, _ = open_log()
    storage.calls.clear()

    offsets = log.append(iter(PAYLOADS))

    assert storage.calls.count("write") == 5
    assert [log.read(one) for one in offsets] == PAYLOADS
    assert open_log()[1] == PAYLOADS


@pytest.mark.parametrize("number", range(1, 6))
def test_a_long_append_that_fails_at_any_write_leaves_nothing(
    open_log: type_of_open, storage: FailingStorage, number: int
) -> None:
    log, _ = open_log()
    log.append([b"\x91before"])
    end = log.end
    fail_at(storage, number)

    with pytest.raises(StorageFailed):
        log.append(iter(PAYLOADS))

    storage.mend()
    assert log.end == end
    log.append([b"\x91behind"])
    assert open_log()[1] == [b"\x91before", b"\x91behind"]


def test_a_payload_that_cannot_be_made_leaves_nothing_of_those_before_it(open_log: type_of_open) -> None:
    def payloads() -> Iterator[bytes]:
        yield from PAYLOADS
        raise ValueError("no payload")

    log, _ = open_log()
    with pytest.raises(ValueError, match="no payload"):
        log.append(payloads())

    log.append([b"\x91behind"])
    assert open_log()[1] == [b"\x91behind"]


@pytest.mark.parametrize("number", [1, 3])
def test_a_long_publish_that_finds_no_room_is_not_there_and_may_be_sent_again(
    open_engine: Callable[..., Engine], storage: FailingStorage, number: int
) -> None:
    batch = [Message(id=f"m{one}", topic="orders", body=payload) for one, payload in enumerate(PAYLOADS)]
    engine = open_engine(storage=storage)
    fail_at(storage, number)

    with pytest.raises(StorageFailed):
        engine.publisher.publish(batch)
    assert engine.puller.pull("orders", "g") == []

    storage.mend()
    assert {one.status for one in engine.publisher.publish(batch)} == {"stored"}
    assert [one.id for one in open_engine().puller.pull("orders", "g")] == [one.id for one in batch]
