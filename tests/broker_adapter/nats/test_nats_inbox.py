"""The inbox in a consumer of nats-py: the effect happens once, though the message is delivered again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig
from sqlalchemy.orm import Session

from outbox import Inbox
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.nats.nats_server import NatsEngine
from tests.fixtures.databases import Database
from tests.outbox.shop import Payment, open_shop

WAIT_SECONDS = 300


@pytest.mark.slow
def test_a_message_that_is_delivered_again_after_its_commit_has_its_effect_once(
    engine: NatsEngine, sqlite: Database
) -> None:
    engine.make_topic("inbox.paid")
    broker = connect(engine.url)
    [result] = broker.publish([Message(id="m-1", topic="inbox.paid", body=b"7")])
    broker.close()
    assert result.status is PublishStatus.STORED

    with open_shop(sqlite) as shop:
        inbox = Inbox(shop.engine)

        def handle(message: Any) -> str:
            message_id = message.headers["outbox-id"]
            with Session(shop.engine) as session, session.begin():
                outcome = inbox.handle(session, message_id, "billing", bill, topic=message.subject)
            return str(outcome)

        def bill(session: Session) -> None:
            session.add(Payment(id=7))

        async def consume(client: Client) -> list[str]:
            config = ConsumerConfig(durable_name="billing", ack_wait=1)
            subscription = await client.jetstream().pull_subscribe("inbox.paid", durable="billing", config=config)
            outcomes = []
            for deliveries in (1, 2):
                [message] = await subscription.fetch(1, timeout=WAIT_SECONDS)
                assert message.metadata.num_delivered == deliveries
                outcomes.append(await asyncio.to_thread(handle, message))
                if deliveries == 2:  # the first time the consumer dies between its commit and the ack
                    await message.ack_sync(timeout=WAIT_SECONDS)
            return outcomes

        outcomes = engine.run(consume)

        assert outcomes == ["handled", "deduplicated"]
        assert shop.payments() == [7]
