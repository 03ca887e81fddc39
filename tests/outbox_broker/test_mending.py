"""Footers that are damaged while the broker runs: made anew from their segments, and nobody but a log notices."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.engine import footer_repair
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.footer_repair import MEND_AGAIN_MS
from outbox_broker.engine.puller import DAMAGED
from outbox_broker.journal.journal import Journal
from outbox_broker.journal.message_reader import StoredMessage
from outbox_broker.log.storage import DiskStorage
from outbox_broker.segments.port import SegmentInfo
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.message import Delivery, GroupConfig, Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.message_log import (
    LoggedFooter,
    clear_footer,
    flip,
    flip_directory,
    flip_footer,
    flip_ids,
    footers_of,
    message_segments,
)

TOPIC, GROUP = "orders", "billing"
SMALL: dict[str, Any] = {"segment_bytes": 4096, "checkpoint_bytes": 65_536, "durability": Durability.OS}
WAIT_S = 120
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *ids: str, topic: str = TOPIC) -> None:
    engine.publisher.publish([Message(id=one, topic=topic, body=one.encode() * 20) for one in ids])


def stored(engine: Engine, clock: ManualClock) -> list[str]:
    """Some segments of two topics, dead letters in each of them; returns the ids of one topic, in order."""
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    for number in range(40):
        publish(engine, *(f"{part}{number}" for part in "abc"))
        publish(engine, f"other{number}", topic="others")
        [one, *_] = engine.puller.pull(TOPIC, GROUP, max_messages=3)
        engine.settler.nack([one.receipt], reason=f"broken {number}")
        clock.advance(1_000)
    return [f"{part}{number}" for number in range(40) for part in "abc"]


def read(engine: Engine, *, topic: str = TOPIC) -> list[str]:
    """All of a topic, from its beginning, by a reader without a group."""
    offset, ids = 0, []
    while (found := engine.reader.read_on(topic, offset, max_messages=50)).messages:
        ids += [one.id for one in found.messages]
        offset = found.next_offset
    return ids


def drained(engine: Engine) -> list[Delivery]:
    """All that a new group is handed."""
    found: list[Delivery] = []
    while more := engine.puller.pull(TOPIC, "another", max_messages=50):
        found += more
    return found


def footers(folder: Path) -> list[LoggedFooter]:
    found = footers_of(folder)
    assert len(found) > 3
    return found


def seen(engine: Engine, clock: ManualClock) -> list[object]:
    """What is looked up in footers, by each verb that does so."""
    places: list[object] = []
    for back_ms in range(0, 40_000, 3_000):
        engine.admin.declare_group(TOPIC, "mover", GroupConfig())
        engine.admin.seek(TOPIC, "mover", to_ms=clock.now_ms() - back_ms)
        figures = engine.admin.group_figures(TOPIC, "mover")
        places.append((figures["position"], figures["oldest_unacked_age_ms"]))
        places.append([one.id for one in engine.puller.pull(TOPIC, "mover", max_messages=4)])
    letters, following = engine.admin.dead(TOPIC, GROUP, limit=30)
    return [*places, letters, following, read(engine), read(engine, topic="others")]


@pytest.mark.parametrize("harm", [flip_footer, clear_footer])
def test_whatever_footer_is_damaged_while_the_broker_runs_all_that_needs_it_goes_on(
    open_engine: type_of_open, folder: Path, clock: ManualClock, harm: Callable[[LoggedFooter], None]
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    before = seen(engine, clock)
    engine = open_engine(**SMALL)

    for footer in footers(folder):
        harm(footer)

    assert seen(engine, clock) == before
    assert before[-2] == ids
    engine.check_ready()


def test_a_footer_that_was_made_anew_is_taken_as_it_is_on_opening(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine = open_engine(**SMALL)
    for footer in footers(folder):
        flip_directory(footer)
    caplog.set_level(logging.INFO)
    engine = open_engine(**SMALL)
    made = [record for record in caplog.records if event_name(record) == "segment_footer_made"]
    publish(engine, *(f"more{number}" for number in range(40)))  # the segment with them is followed by another
    publish(engine, "last")
    for number in range(40):
        ids.append(f"more{number}")
    ids.append("last")
    caplog.clear()

    engine = open_engine(**SMALL)

    assert len(made) > 3
    assert "segment_footer_made" not in map(event_name, caplog.records)
    assert read(engine) == ids
    assert [str(one.status) for one in engine.publisher.publish([Message(id="a7", topic=TOPIC, body=b"")])] == [
        "duplicate"
    ]


def test_a_record_that_is_damaged_with_its_footer_costs_itself_alone(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine = open_engine(**SMALL)
    first = message_segments(folder)[0]
    data = bytearray(first.read_bytes())
    last = [one for one in ids if one.encode() * 20 in data][-1]
    others = [one for one in (f"other{number}" for number in range(40)) if one.encode() * 20 in data]
    for gone in ("c1", last, *others):
        data[data.index(gone.encode() * 20)] ^= 1
    first.write_bytes(data)

    flip_footer(footers_of(folder)[0])

    assert read(engine) == [one for one in ids if one not in {"c1", last}]
    assert others
    assert read(engine, topic="others") == [f"other{number}" for number in range(len(others), 40)]
    assert [one.id for one in drained(engine)] == [one for one in ids if one not in {"c1", last}]
    assert [one.reason for one in engine.admin.dead(TOPIC, "another")[0]] == [DAMAGED] * 2


@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize("harm", [flip_footer, flip_directory, flip_ids, clear_footer])
def test_a_footer_that_was_made_anew_wins_over_the_damaged_one_at_each_later_opening(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture,
    harm: Callable[[LoggedFooter], None], rolls: bool,
) -> None:  # fmt: skip
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine.close()
    harm(footers_of(folder)[0])
    caplog.set_level(logging.INFO)
    made = []
    for opening in range(5):
        caplog.clear()
        engine = open_engine(**SMALL)
        assert read(engine)[: len(ids)] == ids
        if rolls:
            more = [f"more{opening}.{number}" for number in range(50)]
            publish(engine, *more)
        made.append(sum(event_name(record) == "segment_footer_made" for record in caplog.records))

    assert made == [1, 0, 0, 0, 0]


def test_what_an_opening_appended_that_was_refused_then_is_found_by_the_next_one(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine.close()
    for footer in footers_of(folder):
        flip_directory(footer)
    sizes = []
    for _ in range(4):
        disk = FailingStorage(within="actions")
        disk.room_bytes = 0
        with pytest.raises(StorageFailed, match="No space left"):
            open_engine(storage=disk, **SMALL)
        sizes.append(sum(path.stat().st_size for path in message_segments(folder)))

    assert sizes[1:] == sizes[1:2] * 3
    assert read(open_engine(**SMALL)) == ids


def test_a_topic_that_was_deleted_and_made_again_costs_one_footer(
    open_engine: type_of_open, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**SMALL)
    publish(engine, *(f"old{number}" for number in range(60)))
    engine.deletion.delete_topic(TOPIC, force=True)
    for number in range(60):
        publish(engine, f"new{number}")
    caplog.set_level(logging.INFO)
    made = []
    for _ in range(4):
        caplog.clear()
        assert read(open_engine(**SMALL)) == [f"new{number}" for number in range(60)]
        made.append(sum(event_name(record) == "segment_footer_made" for record in caplog.records))

    assert made[1:] == [0, 0, 0]


def test_what_is_damaged_counts_once_however_often_it_is_read(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    engine.close()
    first = message_segments(folder)[0]
    flip(first, first.read_bytes().index(b"a1" * 20))
    flip_directory(footers_of(folder)[0])
    engine = open_engine(**SMALL)
    before = engine.log_figures()["quarantined_bytes"]
    flip_footer(footers_of(folder)[-1])  # the one that was made anew

    read(engine)

    assert engine.context.footer_blocks.mended == 1
    assert engine.log_figures()["quarantined_bytes"] == before > 0


class FullDisk(DiskStorage):
    """Once full, it takes nothing while the reserve is there."""

    def __init__(self, reserve: Path) -> None:
        self.is_full, self.refused, self._reserve = False, 0, reserve

    def write(self, descriptor: int, data: bytes, *, position: int) -> None:
        if self.is_full and self._reserve.exists():
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data, position=position)


class Gate:
    """Stands before the reading of a segment, and counts who comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.reads = threading.Event(), threading.Event(), 0
        self._messages_of = footer_repair.messages_of
        monkeypatch.setattr(footer_repair, "messages_of", self.messages_of)

    def messages_of(self, log: Journal, segment: SegmentInfo) -> Iterator[StoredMessage]:
        self.reads += 1
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        yield from self._messages_of(log, segment)


def test_while_a_segment_is_read_anew_the_others_go_on_and_it_is_read_once(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    engine = open_engine(**SMALL)
    engine.admin.declare_group(TOPIC, "newest", GroupConfig(start="latest"))
    flip_footer(footers_of(folder)[0])
    gate = Gate(monkeypatch)

    with ThreadPoolExecutor(3) as threads:
        pulls = [threads.submit(engine.puller.pull, TOPIC, f"g{number}", max_messages=3) for number in range(3)]
        assert gate.reached.wait(WAIT_S)
        publish(engine, "new")
        [one] = engine.puller.pull(TOPIC, "newest")
        assert engine.settler.ack([one.receipt]) == ["acked"]
        gate.opened.set()
        found = [[one.id for one in pull.result(WAIT_S)] for pull in pulls]

    assert found == [["a0", "b0", "c0"]] * 3
    assert gate.reads == 1


def test_a_segment_that_retention_drops_while_it_is_read_anew_is_passed(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {**SMALL, "retention_bytes": 8192, "retention_drops_unread": True, "retention_check_ms": 10**9}
    engine = open_engine(**bounds)
    stored(engine, clock)
    engine = open_engine(**bounds)
    flip_footer(footers_of(folder)[0])
    gate = Gate(monkeypatch)

    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(engine.puller.pull, TOPIC, "another", max_messages=200)
        assert gate.reached.wait(WAIT_S)
        dropped = engine.retention.drop_outdated()
        gate.opened.set()
        pull.result(WAIT_S)
    found = [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=200)]

    assert dropped > 0
    assert "c39" in [*(one.id for one in pull.result()), *found]
    engine.check_ready()


def test_a_footer_that_cannot_be_made_anew_is_told_by_readiness_until_it_can(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    # So that the next opening does not read what arrived in these segments: nobody has them open then.
    engine.context.schedule.housekeeping.let_go_of_arrivals(engine.context.messages.end, now_ms=clock.now_ms())
    engine = open_engine(**SMALL)
    flip_footer(footers_of(folder)[0])
    segment = message_segments(folder)[0]
    away = segment.rename(segment.with_suffix(".away"))

    with pytest.raises(StorageFailed, match=r"cannot be made anew.*restore messages-.* from a copy"):
        engine.puller.pull(TOPIC, "another", max_messages=3)
    with pytest.raises(StorageFailed, match="cannot be made anew"):
        engine.check_ready()
    away.rename(segment)
    with pytest.raises(StorageFailed, match="cannot be made anew"):
        engine.puller.pull(TOPIC, "another", max_messages=3)  # it was tried just now
    clock.advance(MEND_AGAIN_MS)

    assert [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=3)] == ["a0", "b0", "c0"]
    engine.check_ready()


def test_on_a_full_disk_a_footer_is_made_anew_in_the_room_that_is_kept_for_consuming(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    disk = FullDisk(folder / "reserve")
    engine = open_engine(storage=disk, **SMALL)
    flip_footer(footers_of(folder)[0])
    disk.is_full = True

    assert [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=3)] == ["a0", "b0", "c0"]
    assert disk.refused
