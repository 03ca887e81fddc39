"""A pull from many slots of the timer store delivers not many times the bytes of one from a single slot."""

from __future__ import annotations

from collections.abc import Callable

from broker_adapter.redis.timers.timer_broker import PULL_BYTES_MAX
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import Message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer

Open = Callable[[str], Broker]
SLOTS = 8
MESSAGES = 32
BODY_BYTES = PULL_BYTES_MAX // SLOTS


def test_the_bytes_of_a_pull_are_divided_among_the_slots(server: RedisServer, open_broker: Open, topic: str) -> None:
    broker = open_broker(f"redis://{HOST}:{server.port}/?store=timers&wait=0&slots={SLOTS}")
    batch = [Message(id=new_message_id(), topic=topic, body=b"x" * BODY_BYTES) for _ in range(MESSAGES)]
    broker.publish(batch)

    found: list[str] = []
    while len(found) < MESSAGES:
        pulled = broker.pull(topic, "g", max_messages=MESSAGES, wait_ms=60_000)
        assert sum(len(one.body) for one in pulled) <= PULL_BYTES_MAX + SLOTS * BODY_BYTES
        found += [one.id for one in pulled]

    assert sorted(found) == sorted(one.id for one in batch)
