"""Dead letters of the timer store, read by the page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker_adapter.redis.timers.group_admin import DEAD_BYTES_MAX
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import GroupConfig, Message, NackStatus
from tests.broker_adapter.redis.redis_server import HOST, RedisServer

Open = Callable[[str], Broker]
LETTERS = 5
WAIT_MS = 60_000


@pytest.mark.parametrize("slots", [1, 4])
def test_a_page_ends_behind_so_many_bytes_and_the_next_one_goes_on(
    server: RedisServer, open_broker: Open, topic: str, slots: int
) -> None:
    broker = open_broker(f"redis://{HOST}:{server.port}/?store=timers&wait=0&slots={slots}")
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=1))
    batch = [Message(id=new_message_id(), topic=topic, body=b"x" * (DEAD_BYTES_MAX // 2)) for _ in range(LETTERS)]
    broker.publish(batch)
    dead = 0
    while dead < LETTERS:
        pulled = broker.pull(topic, "g", wait_ms=WAIT_MS)
        assert broker.nack([one.receipt for one in pulled]) == [NackStatus.DEAD] * len(pulled)
        dead += len(pulled)

    pages, after = [], None
    while True:
        letters, after = broker.admin.dead(topic, "g", after=after)
        pages.append([one.id for one in letters])
        if after is None:
            break

    assert max(len(page) for page in pages) == 2
    assert sorted(one for page in pages for one in page) == sorted(one.id for one in batch)
