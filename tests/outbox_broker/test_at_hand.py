"""What a pull may take without waiting for anything: the newest, a little of it, where nobody else is at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.engine import puller
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.puller import PulledMessages
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import GroupConfig, Message
from tests.outbox_broker.message_log import message_segments
from tests.outbox_broker.polling import until

TOPIC, GROUP = "orders", "billing"
type_of_open = Callable[..., Engine]


@pytest.fixture
def engine(open_engine: type_of_open) -> Engine:
    """With one group, that waits at the end."""
    opened = open_engine()
    publish(opened, "before")
    assert ids(opened.puller.take(TOPIC, GROUP, max_messages=10, invisible_ms=1_000)) == ["before"]
    return opened


def publish(engine: Engine, *names: str, body: bytes = b"b") -> None:
    engine.publisher.publish([Message(id=one, topic=TOPIC, body=body) for one in names])


def take_at_hand(engine: Engine, group: str = GROUP) -> list[PulledMessages] | None:
    return engine.puller.take_at_hand(TOPIC, group, max_messages=10, invisible_ms=1_000)


def taken_at_hand(engine: Engine) -> list[PulledMessages]:
    """What is taken once no other thread is at work: the timer looks round when it starts, and when time has passed."""
    found: list[list[PulledMessages]] = []

    def is_taken() -> bool:
        handed = take_at_hand(engine)
        found.extend([] if handed is None else [handed])
        return handed is not None

    until(is_taken)
    return found[0]


def ids(handed: list[PulledMessages] | None) -> list[str]:
    assert handed is not None
    return [record.id for one in handed for record in one.records]


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """Another thread has the lock."""
    has, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            assert let_go.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(120)
    try:
        yield
    finally:
        let_go.set()
        thread.join()


def test_what_was_just_published_is_taken_once_as_any_pull_takes_it(engine: Engine) -> None:
    publish(engine, "a", "b")

    handed = taken_at_hand(engine)

    assert ids(handed) == ["a", "b"]
    assert taken_at_hand(engine) == []
    assert engine.puller.take(TOPIC, GROUP, max_messages=10, invisible_ms=1_000) == []
    receipts = [receipt for one in handed for receipt in one.receipts(TOPIC, GROUP)]
    assert [str(one) for one in engine.settler.ack(receipts)] == ["acked", "acked"]


def test_what_comes_back_is_taken_as_well(engine: Engine, clock: ManualClock) -> None:
    clock.advance(1_000)

    handed = taken_at_hand(engine)

    assert ids(handed) == ["before"]
    assert handed[0].out.attempt == 2


def refuses(engine: Engine) -> None:
    """It takes nothing, and nothing is lost by it."""
    assert take_at_hand(engine) is None
    assert ids(engine.puller.take(TOPIC, GROUP, max_messages=10, invisible_ms=1_000)) == ["a"]


def test_what_is_much_is_left_to_who_may_wait(engine: Engine) -> None:
    publish(engine, "a", body=b"x" * (puller.AT_HAND_BYTES_MAX + 1))

    refuses(engine)


def test_what_is_long_past_is_left_to_who_may_wait(engine: Engine, open_engine: type_of_open) -> None:
    engine = open_engine(immediate_pull_lag_bytes_max=1)
    publish(engine, "a")

    refuses(engine)


def test_nothing_is_taken_while_somebody_else_is_at_work(engine: Engine) -> None:
    publish(engine, "a")
    group = engine.context.state.group(TOPIC, GROUP)
    assert group is not None

    with held_elsewhere(engine.context.lock):
        assert take_at_hand(engine) is None
    with held_elsewhere(group.pulling):
        assert take_at_hand(engine) is None

    assert ids(taken_at_hand(engine)) == ["a"]


def test_nothing_is_taken_where_something_is_to_be_fired_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, "a")
    monkeypatch.setattr(engine.dispatcher, "may_be_dispatching", lambda: True)

    refuses(engine)


@pytest.mark.parametrize("config", [GroupConfig(filter="a = 'b'"), GroupConfig(ordered=True)])
def test_groups_that_look_through_messages_are_left_to_who_may_wait(engine: Engine, config: GroupConfig) -> None:
    engine.admin.declare_group(TOPIC, "other", config)

    assert take_at_hand(engine, "other") is None
    assert take_at_hand(engine, "unknown") is None


def test_nothing_is_taken_while_a_batch_is_on_its_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, "a")
    with monkeypatch.context() as context:
        context.setattr(engine.dispatcher, "is_dispatching", True)
        assert take_at_hand(engine) is None

    assert ids(taken_at_hand(engine)) == ["a"]


@pytest.mark.parametrize("returns", [False, True], ids=["not handed out yet", "handed out before"])
def test_no_footer_is_read_to_choose_what_lies_in_a_sealed_segment(
    open_engine: type_of_open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    engine = open_engine(segment_bytes=4096)
    publish(engine, "old")
    if returns:
        assert ids(engine.puller.take(TOPIC, GROUP, max_messages=1, invisible_ms=1_000)) == ["old"]
    else:
        engine.admin.declare_group(TOPIC, GROUP, GroupConfig())
    for number in range(80):
        publish(engine, f"m{number}", body=b"b" * 100)
        if returns:
            engine.puller.take(TOPIC, GROUP, max_messages=1, invisible_ms=1_000_000)
    clock.advance(1_000)
    read: list[object] = []
    load = engine.context.footer_blocks.load
    monkeypatch.setattr(engine.context.footer_blocks, "load", lambda place: read.append(place) or load(place))

    assert take_at_hand(engine) is None

    assert read == []
    assert ids(engine.puller.take(TOPIC, GROUP, max_messages=1, invisible_ms=1_000)) == ["old"]
    assert read


def test_what_is_to_be_a_dead_letter_first_is_left_to_who_may_wait(engine: Engine, clock: ManualClock) -> None:
    engine.admin.declare_group(TOPIC, GROUP, GroupConfig(max_attempts=1))
    publish(engine, "a")
    clock.advance(1_000)
    before = engine.context.actions.end

    assert take_at_hand(engine) is None

    assert engine.context.actions.end == before
    assert ids(engine.puller.take(TOPIC, GROUP, max_messages=10, invisible_ms=1_000)) == ["a"]
    assert engine.admin.group_figures(TOPIC, GROUP)["dead"] == 1


def test_a_paused_group_is_told_at_once_that_there_is_nothing(engine: Engine) -> None:
    publish(engine, "a")
    engine.admin.pause(TOPIC, GROUP, paused=True)

    assert taken_at_hand(engine) == []


def test_a_damaged_record_is_put_aside_by_who_may_wait(engine: Engine, folder: Path) -> None:
    publish(engine, "damaged")
    publish(engine, "a")
    [path] = message_segments(folder)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"eamaged"))
    before = engine.context.actions.end

    assert take_at_hand(engine) is None

    assert engine.context.actions.end == before
    assert ids(engine.puller.take(TOPIC, GROUP, max_messages=10, invisible_ms=1_000)) == ["a"]
