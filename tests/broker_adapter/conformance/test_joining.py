"""Consumers of one group come and go: what they take grows with them at once, and nobody waits for who hangs."""

from __future__ import annotations

from outbox_core import Broker, Message
from outbox_core.messages.ids import new_message_id

GROUP = "g"
BATCH = 2


def test_a_backlog_drains_by_as_much_more_as_consumers_join_from_their_first_pull_on(
    broker: Broker, topic: str
) -> None:  # fmt: skip
    sizes = (1, 50, 500, 50)
    ids = [new_message_id() for _ in range(BATCH * (1 + sum(sizes)))]
    broker.publish([Message(id=one, topic=topic, body=b"x") for one in ids])
    hanging = broker.pull(topic, GROUP, max_messages=BATCH, invisible_ms=3_600_000)

    handled: list[str] = []
    for consumers in sizes:
        turn = [broker.pull(topic, GROUP, max_messages=BATCH) for _ in range(consumers)]
        assert [len(taken) for taken in turn] == [BATCH] * consumers
        for taken in turn:
            assert broker.ack([one.receipt for one in taken]) == ["acked"] * BATCH
        handled += [one.id for taken in turn for one in taken]

    assert sorted([*handled, *(one.id for one in hanging)]) == sorted(ids)
    figures = broker.admin.figures(topic, GROUP)
    assert (figures["backlog"], figures["in_flight"]) == (0, BATCH)
