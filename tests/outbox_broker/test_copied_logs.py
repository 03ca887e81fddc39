"""Messages that carry a copy of a log: what is in them is a message of nobody, whatever becomes of the record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.journal.block import SEGMENT_HEAD_BYTES
from outbox_core.messages.message import Message
from tests.outbox_broker.message_log import NOTE, message_segments

TOPIC, BACKUPS, GROUP = "orders", "backups", "billing"

type_of_open = Callable[..., Engine]


def publish(engine: Engine, topic: str, *bodies: bytes) -> None:
    """Publish messages, each by itself, whose ids count from 0."""
    for number, body in enumerate(bodies):
        engine.publisher.publish([Message(id=f"{topic}-{number}", topic=topic, body=body)])


def pull_ids(engine: Engine, topic: str = TOPIC) -> list[str]:
    return [one.id for one in engine.puller.pull(topic, GROUP)]


def segment_of(folder: Path) -> Path:
    """The only segment of the message log."""
    [path] = message_segments(folder)
    return path


def copied(folder: Path) -> bytes:
    """The frames of the message log."""
    return segment_of(folder).read_bytes()[SEGMENT_HEAD_BYTES:]


@pytest.mark.parametrize("cut_bytes", [1, 20, 150])
def test_a_publish_of_a_copy_that_a_kill_cuts_short_publishes_nothing_that_is_in_it(
    open_engine: type_of_open, folder: Path, cut_bytes: int
) -> None:
    engine = open_engine()
    publish(engine, TOPIC, b"first", b"second")
    publish(engine, BACKUPS, copied(folder) * 4)
    engine.close()
    (folder / "messages" / NOTE).unlink()  # it was killed
    os.truncate(segment_of(folder), segment_of(folder).stat().st_size - cut_bytes)

    engine = open_engine()

    assert engine.admin.topics() == [TOPIC]
    assert engine.admin.topic_figures(TOPIC)["stored"] == 2
    assert pull_ids(engine) == [f"{TOPIC}-0", f"{TOPIC}-1"]
    assert engine.log_figures()["quarantined_bytes"] == 0, "a torn tail is no damage"


@pytest.mark.parametrize("reopened", [True, False], ids=["found on opening", "found by a pull"])
def test_a_flipped_bit_in_a_message_that_carries_a_copy_costs_that_message_alone(
    open_engine: type_of_open, folder: Path, reopened: bool
) -> None:
    engine = open_engine()
    publish(engine, TOPIC, b"first", b"second")
    taken = copied(folder)
    publish(engine, BACKUPS, b"before", taken * 4, b"after")
    if reopened:
        engine.close()
    whole = segment_of(folder).read_bytes()
    place = whole.index(taken * 4) + len(taken) - 1
    segment_of(folder).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])

    engine = open_engine() if reopened else engine

    assert engine.admin.topic_figures(TOPIC)["stored"] == 2
    assert pull_ids(engine) == [f"{TOPIC}-0", f"{TOPIC}-1"]
    got = [*pull_ids(engine, BACKUPS), *pull_ids(engine, BACKUPS)]
    assert got == [f"{BACKUPS}-0", f"{BACKUPS}-2"]
    [letter] = engine.admin.dead(BACKUPS, GROUP)[0]
    assert "damaged" in letter.reason
