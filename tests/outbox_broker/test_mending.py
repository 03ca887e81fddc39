"""Index files that are damaged while the broker runs: made anew from their segments, and nobody but a log notices."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.common.engine_options import Durability
from outbox_broker.engine import index_repair
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.index_repair import MEND_AGAIN_MS
from outbox_broker.engine.puller import DAMAGED
from outbox_broker.log.segment_index import index_path
from outbox_broker.log.segment_scan import Gap, Segment
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import Frame, segment_paths
from outbox_core.messages.message import Delivery, GroupConfig, Message
from outbox_core.runtime.logs import event_name

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


def indexes(folder: Path) -> list[Path]:
    found = sorted((folder / "messages").glob("*.index"))
    assert len(found) > 3
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5])


def lose(path: Path) -> None:
    path.unlink()


def seen(engine: Engine, clock: ManualClock) -> list[object]:
    """What is looked up in index files, by each verb that does so."""
    places: list[object] = []
    for back_ms in range(0, 40_000, 3_000):
        engine.admin.declare_group(TOPIC, "mover", GroupConfig())
        engine.admin.seek(TOPIC, "mover", to_ms=clock.now_ms() - back_ms)
        figures = engine.admin.group_figures(TOPIC, "mover")
        places.append((figures["position"], figures["oldest_unacked_age_ms"]))
        places.append([one.id for one in engine.puller.pull(TOPIC, "mover", max_messages=4)])
    letters, following = engine.admin.dead(TOPIC, GROUP, limit=30)
    return [*places, letters, following, read(engine), read(engine, topic="others")]


@pytest.mark.parametrize("harm", [flip, cut, lose])
def test_whatever_index_is_damaged_while_the_broker_runs_all_that_needs_it_goes_on(
    open_engine: type_of_open, folder: Path, clock: ManualClock, harm: Callable[[Path], None]
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    before = seen(engine, clock)
    engine = open_engine(**SMALL)

    for path in indexes(folder):
        harm(path)

    assert seen(engine, clock) == before
    assert before[-2] == ids
    engine.check_ready()


def test_an_index_that_was_made_anew_is_taken_as_it_is_on_opening(
    open_engine: type_of_open, folder: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine = open_engine(**SMALL)
    for path in indexes(folder):
        flip(path)
    read(engine)
    caplog.clear()

    engine = open_engine(**SMALL)

    assert "segment_index_built" not in map(event_name, caplog.records)
    assert read(engine) == ids
    assert [str(one.status) for one in engine.publisher.publish([Message(id="a7", topic=TOPIC, body=b"")])] == [
        "duplicate"
    ]


def test_a_record_that_is_damaged_with_its_index_costs_itself_alone(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    ids = stored(engine, clock)
    engine = open_engine(**SMALL)
    first = segment_paths(folder / "messages")[0]
    data = bytearray(first.read_bytes())
    last = [one for one in ids if one.encode() * 20 in data][-1]
    others = [one for one in (f"other{number}" for number in range(40)) if one.encode() * 20 in data]
    for gone in ("c1", last, *others):
        data[data.index(gone.encode() * 20)] ^= 1
    first.write_bytes(data)

    flip(index_path(folder / "messages", 0))

    assert read(engine) == [one for one in ids if one not in {"c1", last}]
    assert others
    assert read(engine, topic="others") == [f"other{number}" for number in range(len(others), 40)]
    assert [one.id for one in drained(engine)] == [one for one in ids if one not in {"c1", last}]
    assert [one.reason for one in engine.admin.dead(TOPIC, "another")[0]] == [DAMAGED] * 2


class Gate:
    """Stands before the reading of a segment, and counts who comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened, self.reads = threading.Event(), threading.Event(), 0
        self._scan = index_repair.scan
        monkeypatch.setattr(index_repair, "scan", self.scan)

    def scan(self, segment: Segment, *, start: int) -> Iterator[Frame | Gap]:
        self.reads += 1
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        yield from self._scan(segment, start=start)


def test_while_a_segment_is_read_anew_the_others_go_on_and_it_is_read_once(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    engine = open_engine(**SMALL)
    engine.admin.declare_group(TOPIC, "newest", GroupConfig(start="latest"))
    flip(index_path(folder / "messages", 0))
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
    flip(index_path(folder / "messages", 0))
    gate = Gate(monkeypatch)

    with ThreadPoolExecutor(1) as threads:
        pull = threads.submit(engine.puller.pull, TOPIC, "another", max_messages=200)
        assert gate.reached.wait(WAIT_S)
        dropped = engine.retention.drop_outdated()
        gate.opened.set()
        pull.result(WAIT_S)
    found = [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=200)]

    assert dropped > 0
    assert not index_path(folder / "messages", 0).exists()
    assert "c39" in [*(one.id for one in pull.result()), *found]
    engine.check_ready()


def test_an_index_that_cannot_be_made_anew_is_told_by_readiness_until_it_can(
    open_engine: type_of_open, folder: Path, clock: ManualClock
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    engine = open_engine(**SMALL)
    flip(index_path(folder / "messages", 0))
    segment = segment_paths(folder / "messages")[0]
    away = segment.rename(segment.with_suffix(".away"))

    with pytest.raises(StorageFailed, match=r"cannot be made anew.*restore .*\.log from a copy"):
        engine.puller.pull(TOPIC, "another", max_messages=3)
    with pytest.raises(StorageFailed, match="cannot be made anew"):
        engine.check_ready()
    away.rename(segment)
    with pytest.raises(StorageFailed, match="cannot be made anew"):
        engine.puller.pull(TOPIC, "another", max_messages=3)  # it was tried just now
    clock.advance(MEND_AGAIN_MS)

    assert [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=3)] == ["a0", "b0", "c0"]
    engine.check_ready()


def test_on_a_full_disk_an_index_is_made_anew_in_the_room_that_is_kept_for_consuming(
    open_engine: type_of_open, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(**SMALL)
    stored(engine, clock)
    engine = open_engine(**SMALL)
    flip(index_path(folder / "messages", 0))
    write = index_repair.write_index

    def full(*arguments: object, **named: object) -> object:
        if (folder / "reserve").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments, **named)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(index_repair, "write_index", full)

    assert [one.id for one in engine.puller.pull(TOPIC, "another", max_messages=3)] == ["a0", "b0", "c0"]
