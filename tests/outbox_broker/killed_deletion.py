"""A run of an engine that deletes a group and a topic, for deaths at each of its storage calls. Not a test."""

from __future__ import annotations

from pathlib import Path

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.message import Message
from tests.outbox_broker.killed_engine import (
    DAY_MS,
    GROUP,
    RESERVE_BYTES,
    START_MS,
    TOPIC,
    KillingStorage,
    type_of_tell,
)

KEPT = "kept"


def deleting_run(folder: Path, storage: KillingStorage, tell: type_of_tell) -> None:
    """Messages and scheduled ones of two topics; a group is deleted and made again, then one of the topics."""
    clock = ManualClock(START_MS)
    options = EngineOptions(segment_bytes=4096, schedule_memory_messages_max=4, reserve_bytes=RESERVE_BYTES)
    engine = Engine.open(folder, clock=clock, options=options, storage=storage)

    def publish(what: str, *ids: str, topic: str = TOPIC, deliver_at_ms: int | None = None) -> None:
        tell(asked=what, ids=ids)
        batch = [Message(id=one, topic=topic, body=b"x" * 700, deliver_at_ms=deliver_at_ms) for one in ids]
        assert {one.status for one in engine.publisher.publish(batch)} == {"stored"}
        tell(answered=what, ids=ids)

    publish("kept", "k0", "k1", topic=KEPT)
    publish("kept", "k2", topic=KEPT, deliver_at_ms=START_MS + 1_000)
    publish("old", "a0", "a1", "a2")
    publish("scheduled", "s0", "s1", "s2", deliver_at_ms=START_MS + 1_000)
    publish("scheduled", "s3", "s4", deliver_at_ms=START_MS + 20 * DAY_MS)
    held = [one.receipt for one in engine.puller.pull(TOPIC, GROUP, max_messages=2)]
    engine.settler.ack(held[:1])
    tell(asked="delete_group", ids=["group"])
    engine.deletion.delete_group(TOPIC, GROUP, force=True)
    tell(answered="delete_group", ids=["group"])
    publish("old", "b0", "b1")
    tell(asked="pull", ids=["any"])
    engine.puller.pull(TOPIC, GROUP, max_messages=1)
    publish("scheduled", "s5", "s6", "s7", "s8", deliver_at_ms=START_MS + 20 * DAY_MS + 1)
    tell(asked="delete_topic", ids=["topic"])
    engine.deletion.delete_topic(TOPIC, force=True)
    tell(answered="delete_topic", ids=["topic"])
    publish("new", "n0", "n1")
    publish("new", "n2", deliver_at_ms=START_MS + 1_000)
    clock.advance(1_000)
    engine.puller.pull(TOPIC, GROUP, max_messages=1)
    engine.close()
