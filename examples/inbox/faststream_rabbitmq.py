"""A consumer by FastStream of a RabbitMQ queue that is bound by the topic.

export DATABASE_URL=mysql+aiomysql://app@db/shop RABBITMQ_URL=amqp://app:secret@mq1 QUEUE=ticketing
python examples/inbox/faststream_rabbitmq.py
"""

import asyncio
import os

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_async_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
broker = RabbitBroker(os.environ["RABBITMQ_URL"], default_channel=Channel(prefetch_count=10))
queue = RabbitQueue(os.environ["QUEUE"], declare=False)


# FastStream acknowledges when the function has returned, so the transaction ends in it; what fails is delivered again.
@broker.subscriber(queue, ack_policy=AckPolicy.NACK_ON_ERROR)
async def issue_ticket_once(order: dict[str, int], message: RabbitMessage) -> None:
    async def issue_ticket(session: AsyncSession) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    async with AsyncSession(engine) as session, session.begin():
        await inbox.handle_async(session, message.message_id, GROUP, issue_ticket, topic=TOPIC)


asyncio.run(FastStream(broker).run())
