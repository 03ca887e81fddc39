"""A consumer by FastStream of a Kafka topic.

DATABASE_URL=mysql+aiomysql://app@db/shop KAFKA=k1:9092 python examples/inbox/faststream_kafka.py
"""

import asyncio
import os

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker, KafkaMessage
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_async_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
broker = KafkaBroker(os.environ["KAFKA"])


# FastStream commits the offset when the function has returned, so the transaction ends in it; what fails is read again.
@broker.subscriber(TOPIC, group_id=GROUP, auto_offset_reset="earliest", ack_policy=AckPolicy.NACK_ON_ERROR)
async def issue_ticket_once(order: dict[str, int], message: KafkaMessage) -> None:
    async def issue_ticket(session: AsyncSession) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    async with AsyncSession(engine) as session, session.begin():
        await inbox.handle_async(session, message.headers["outbox-id"], GROUP, issue_ticket, topic=TOPIC)


asyncio.run(FastStream(broker).run())
