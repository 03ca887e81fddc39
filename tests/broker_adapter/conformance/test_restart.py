"""What every broker still knows after it was taken down without warning."""

from __future__ import annotations

import time

import pytest

from outbox_core import GroupConfig, Message
from outbox_core.messages.ids import new_message_id
from tests.broker_adapter.servers import Restartable

WAIT_MS = 60_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.slow
def test_a_restart_keeps_messages_positions_acks_schedule_cancels_and_dead_letters(
    restartable: Restartable, topic: str
) -> None:
    broker = restartable.broker
    batch = [Message(id=new_message_id(), topic=topic, body=str(number).encode()) for number in range(6)]
    due = Message(id=new_message_id(), topic=topic, body=b"due", deliver_at_ms=now_ms() + 50)
    far = Message(id=new_message_id(), topic=topic, body=b"far", deliver_at_ms=now_ms() + 86_400_000)
    broker.admin.declare_group(topic, "g", GroupConfig(max_attempts=2))
    broker.publish([*batch, due, far])
    gone = Message(id=new_message_id(), topic=topic, body=b"gone", deliver_at_ms=now_ms() + 5_000)
    broker.publish([gone])
    assert broker.cancel([gone.id]) == ["canceled"]
    acked, poison, held, given_back = broker.pull(topic, "g", max_messages=4, invisible_ms=60_000)
    broker.ack([acked.receipt])
    broker.nack([poison.receipt, given_back.receipt], delay_ms=0, reason="broken")
    again = broker.pull(topic, "g", max_messages=1, wait_ms=WAIT_MS)
    broker.nack([again[0].receipt], reason="broken for good")

    restartable.restart()
    broker = restartable.broker

    assert [one.status for one in broker.publish([batch[0], far])] == ["duplicate", "duplicate"]
    assert [one.id for one in broker.admin.dead(topic, "g")[0]] == [poison.id]
    assert broker.ack([acked.receipt, held.receipt]) == ["already_acked", "acked"]
    rest: list[str] = []
    while len(rest) < 4:
        found = broker.pull(topic, "g", wait_ms=WAIT_MS, invisible_ms=60_000)
        assert found
        rest += [one.id for one in found]
    assert sorted(rest) == sorted([given_back.id, batch[4].id, batch[5].id, due.id])
    assert broker.admin.figures(topic, "g")["scheduled"] == 1
    assert broker.pull(topic, "g", wait_ms=max(1, (gone.deliver_at_ms or 0) + 100 - now_ms())) == []
    assert broker.cancel([gone.id, far.id]) == ["canceled", "canceled"]


def test_a_message_in_flight_at_a_restart_comes_back_when_its_time_is_over(
    restartable: Restartable, topic: str
) -> None:
    sent = Message(id=new_message_id(), topic=topic, body=b"x")
    restartable.broker.publish([sent])
    [first] = restartable.broker.pull(topic, "g", invisible_ms=200)

    restartable.restart()
    [second] = restartable.broker.pull(topic, "g", wait_ms=WAIT_MS)

    assert (second.id, second.attempt) == (sent.id, 2)
    assert restartable.broker.ack([first.receipt, second.receipt]) == ["stale", "acked"]


def test_order_goes_on_after_a_restart(restartable: Restartable, topic: str) -> None:
    ids = [new_message_id() for _ in range(6)]
    restartable.broker.publish([Message(id=one, topic=topic, body=b"x") for one in ids[:3]])

    restartable.restart()
    restartable.broker.publish([Message(id=one, topic=topic, body=b"x") for one in ids[3:]])

    assert [one.id for one in restartable.broker.pull(topic, "g")] == ids
