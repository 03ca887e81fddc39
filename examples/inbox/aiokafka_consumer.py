"""A consumer by aiokafka.

DATABASE_URL=mysql+aiomysql://app@db/shop KAFKA=k1:9092 python examples/inbox/aiokafka_consumer.py
"""

import asyncio
import json
import os

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_async_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


async def issue_ticket_once(record: ConsumerRecord) -> None:
    order = json.loads(record.value)

    async def issue_ticket(session: AsyncSession) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    message_id = dict(record.headers)["outbox-id"].decode()
    async with AsyncSession(engine) as session, session.begin():
        await inbox.handle_async(session, message_id, GROUP, issue_ticket, topic=TOPIC)


async def main() -> None:
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=os.environ["KAFKA"],
        group_id=GROUP,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    async for record in consumer:
        await issue_ticket_once(record)
        await consumer.commit()  # the offset, after the transaction


asyncio.run(main())
