"""A consumer by FastStream of a NATS stream that covers the topic.

DATABASE_URL=mysql+aiomysql://app@db/shop NATS_URL=nats://app:secret@n1 python examples/inbox/faststream_nats.py
"""

import asyncio
import os

from faststream import AckPolicy, FastStream
from faststream.nats import JStream, NatsBroker, NatsMessage
from nats.js.api import ConsumerConfig
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_async_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
broker = NatsBroker(os.environ["NATS_URL"])


# FastStream acknowledges when the function has returned, so the transaction ends in it; what fails is delivered again.
@broker.subscriber(
    TOPIC,
    stream=JStream(name=os.environ["NATS_STREAM"], declare=False),
    durable=GROUP,
    pull_sub=True,
    config=ConsumerConfig(ack_wait=10),
    ack_policy=AckPolicy.NACK_ON_ERROR,
)
async def issue_ticket_once(order: dict[str, int], message: NatsMessage) -> None:
    async def issue_ticket(session: AsyncSession) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    async with AsyncSession(engine) as session, session.begin():
        await inbox.handle_async(session, message.headers["outbox-id"], GROUP, issue_ticket, topic=TOPIC)


asyncio.run(FastStream(broker).run())
