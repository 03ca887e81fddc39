"""Broadcast: readers without a group, each at a place of its own. Nothing of them is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.engine import topic_reader
from outbox_broker.engine.engine import Engine
from outbox_broker.journal.message_reader import Found
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage, StorageFailed
from outbox_core.messages.message import GroupConfig, Message
from outbox_core.runtime.logs import event_name
from tests.outbox_broker.failing_storage import HeldSyncs
from tests.outbox_broker.message_log import message_segments

TOPIC = "prices"
HOUR_MS = 3_600_000
WAIT_S = 60
type_of_open = Callable[..., Engine]


def publish(engine: Engine, *ids: str, deliver_at_ms: int | None = None) -> None:
    engine.publisher.publish(
        [Message(id=one, topic=TOPIC, body=one.encode(), deliver_at_ms=deliver_at_ms) for one in ids]
    )


def read(engine: Engine, offset: int, **more: int) -> list[str]:
    return [one.id for one in engine.reader.read(TOPIC, offset=offset, **more).messages]  # type: ignore[arg-type]


def test_every_reader_gets_every_message_from_its_own_place_and_groups_theirs(engine: Engine) -> None:
    publish(engine, "a", "b")
    late = engine.reader.read(TOPIC)
    publish(engine, "c")

    assert read(engine, 0) == read(engine, 0) == ["a", "b", "c"]
    assert read(engine, 1, max_messages=1) == ["b"]
    assert (late.messages, late.next_offset) == ([], 2)
    assert read(engine, late.next_offset) == ["c"]
    assert [one.id for one in engine.puller.pull(TOPIC, "g")] == ["a", "b", "c"]
    assert engine.admin.groups(TOPIC) == ["g"]


def test_a_reader_is_told_all_of_a_message(engine: Engine, clock: ManualClock) -> None:
    sent = Message(
        id="a", topic=TOPIC, body=b"\xff", key="k", headers={"h": "1"}, created_at_ms=7,
        deliver_at_ms=clock.now_ms() - 1,
    )  # fmt: skip
    engine.publisher.publish([sent])

    found = engine.reader.read(TOPIC, start="earliest").messages[0]

    assert (found.id, found.body, found.key, dict(found.headers), found.created_at_ms) == (
        "a", b"\xff", "k", {"h": "1"}, 7,
    )  # fmt: skip
    assert found.deliver_at_ms == sent.deliver_at_ms


def test_places_hold_across_restarts(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "a", "b")
    place = engine.reader.read(TOPIC, offset=0, max_messages=1).next_offset

    engine = open_engine()
    publish(engine, "c")

    assert read(engine, place) == ["b", "c"]


def test_a_publish_wakes_all_who_wait(open_engine: type_of_open) -> None:
    engine = open_engine()
    readers = 8
    with ThreadPoolExecutor(readers) as pool:
        found = [pool.submit(read, engine, 0, wait_ms=60_000) for _ in range(readers)]
        until_waiting(engine, readers)
        publish(engine, "a")

        assert [one.result(WAIT_S) for one in found] == [["a"]] * readers


def test_who_waits_is_woken_although_no_filter_of_the_topic_takes_the_message(engine: Engine) -> None:
    engine.admin.declare_group(TOPIC, "picky", GroupConfig(filter="type = 'never'"))
    publish(engine, "seen")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read, engine, 1, wait_ms=60_000)
        until_waiting(engine, 1)
        publish(engine, "a")

        assert found.result(WAIT_S) == ["a"]


def test_a_message_for_later_comes_when_it_is_due(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "later", deliver_at_ms=clock.now_ms() + HOUR_MS)
    assert read(engine, 0) == []

    clock.advance(HOUR_MS)

    assert read(engine, 0) == ["later"]


def test_a_message_that_is_early_since_the_clock_stepped_back_is_waited_for(engine: Engine, clock: ManualClock) -> None:
    publish(engine, "due", deliver_at_ms=clock.now_ms() + 1_000)
    clock.advance(1_000)
    assert read(engine, 0) == ["due"]
    publish(engine, "now")

    clock.step_wall(-500)
    held = engine.reader.read(TOPIC, offset=0)
    clock.advance(500)

    assert (held.messages, held.next_offset) == ([], 0)
    assert read(engine, 0) == ["due", "now"]


def test_nobody_reads_what_is_not_durable(open_engine: type_of_open) -> None:
    storage = HeldSyncs()
    engine = open_engine(storage=storage)
    publish(engine, "a")
    storage.hold()
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish, engine, "b")
        assert storage.waiting.wait(WAIT_S)
        before = engine.reader.read(TOPIC, offset=0)
        storage.release()
        published.result(WAIT_S)

    assert [one.id for one in before.messages] == ["a"]
    assert before.next_offset == 1
    assert read(engine, 1) == ["b"]


def test_what_retention_dropped_is_told_by_where_the_answer_begins(
    open_engine: type_of_open, clock: ManualClock, folder: Path
) -> None:
    engine = open_engine(segment_bytes=4096, checkpoint_bytes=4096, retention_ms=HOUR_MS, retention_check_ms=10**15)
    for number in range(60):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=bytes(200))])
    assert len(message_segments(folder)) > 2
    clock.advance(HOUR_MS)
    publish(engine, "new")
    engine.retention.drop_outdated()

    found = engine.reader.read(TOPIC, offset=3, max_messages=1_000)

    assert 3 < found.offset == 61 - len(found.messages)
    assert found.messages[-1].id == "new"
    assert engine.reader.read(TOPIC, start="earliest").offset == found.offset


def test_what_retention_drops_while_it_is_read_is_not_told_as_damaged(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(segment_bytes=4096, checkpoint_bytes=4096, retention_ms=HOUR_MS, retention_check_ms=10**15)
    for number in range(60):
        engine.publisher.publish([Message(id=f"m{number}", topic=TOPIC, body=bytes(200))])
    clock.advance(HOUR_MS)
    publish(engine, "new")
    read_runs = topic_reader.read_runs
    dropped: list[int] = []

    def read_late(*arguments: Any, **named: Any) -> list[Found]:
        dropped.append(engine.retention.drop_outdated())
        return read_runs(*arguments, **named)

    monkeypatch.setattr(topic_reader, "read_runs", read_late)

    found = engine.reader.read_on(TOPIC, 0, max_messages=1_000)

    assert dropped[0] > 0
    assert found.messages[-1].id == "new"
    assert len(found.messages) < found.next_offset == 61
    assert "record_skipped" not in map(event_name, caplog.records)


def test_a_place_behind_the_end_is_answered_with_the_end(engine: Engine) -> None:
    publish(engine, "a")

    found = engine.reader.read(TOPIC, offset=9, wait_ms=60_000)

    assert (found.messages, found.next_offset) == ([], 1)


def test_a_topic_that_is_not_there_has_no_messages_and_is_not_made(engine: Engine) -> None:
    assert engine.reader.read(TOPIC).next_offset == engine.reader.read(TOPIC, offset=5).next_offset == 0
    assert engine.admin.topics() == []


def test_a_damaged_record_is_passed_over_and_told(
    engine: Engine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(engine, "before", "damaged", "after")
    path = message_segments(folder)[0]
    data = bytearray(path.read_bytes())
    data[data.rindex(b"damaged")] ^= 1
    path.write_bytes(data)

    found = engine.reader.read(TOPIC, offset=0)

    assert [one.id for one in found.messages] == ["before", "after"]
    assert found.next_offset == 3
    assert "record_skipped" in map(event_name, caplog.records)


def test_an_answer_is_bounded_in_bytes_and_the_next_one_goes_on(open_engine: type_of_open) -> None:
    engine = open_engine(pull_bytes_max=10)
    publish(engine, *(f"message-{number}" for number in range(4)))

    place, found = 0, []
    for _ in range(4):
        answer = engine.reader.read(TOPIC, offset=place)
        found.append(len(answer.messages))
        place = answer.next_offset

    assert place == 4
    assert max(found) <= 2


@pytest.mark.parametrize(
    "wrong", [{"start": "middle"}, {"max_messages": 0}, {"max_messages": 1_001}, {"wait_ms": 60_001}, {"topic": "../x"}]
)
def test_what_cannot_be_read_is_refused(engine: Engine, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidMessage):
        engine.reader.read(**{"topic": TOPIC, **wrong})  # type: ignore[arg-type]


def test_closing_sends_who_waits_away(open_engine: type_of_open) -> None:
    engine = open_engine()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read, engine, 0, wait_ms=60_000)
        until_waiting(engine, 1)
        engine.close()

        assert isinstance(found.exception(WAIT_S), StorageFailed)


def until_waiting(engine: Engine, count: int) -> None:
    """Until so many wait, as the engine itself counts them."""
    paused = threading.Event()
    for _ in range(WAIT_S * 200):
        if len(engine.wakeups.waiters.get((TOPIC, ""), ())) == count:
            return
        paused.wait(0.005)
    raise AssertionError("they do not wait")
