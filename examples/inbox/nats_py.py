"""A consumer by nats-py of a JetStream stream that covers the topic.

DATABASE_URL=mysql+aiomysql://app@db/shop NATS_URL=nats://app:secret@n1 python examples/inbox/nats_py.py
"""

import asyncio
import json
import os

import nats
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_async_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


async def issue_ticket_once(message: Msg) -> None:
    order = json.loads(message.data)

    async def issue_ticket(session: AsyncSession) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    message_id = (message.headers or {})["outbox-id"]
    async with AsyncSession(engine) as session, session.begin():
        await inbox.handle_async(session, message_id, GROUP, issue_ticket, topic=TOPIC)
    await message.ack()  # after the commit


async def main() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    # What is not acknowledged is delivered again after ack_wait: longer than the slowest handler.
    config = ConsumerConfig(ack_wait=10)
    subscription = await client.jetstream().pull_subscribe(TOPIC, durable=GROUP, config=config)
    while True:
        try:
            messages = await subscription.fetch(1, timeout=5)
        except TimeoutError:  # the client's own subclass, or asyncio's: it raises both
            continue
        for message in messages:
            await issue_ticket_once(message)


asyncio.run(main())
