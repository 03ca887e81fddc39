"""A consumer by confluent-kafka.

DATABASE_URL=mysql+pymysql://app@db/shop KAFKA=k1:9092 python examples/inbox/confluent_kafka_consumer.py
"""

import json
import os
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


def issue_ticket_once(message: Message) -> None:
    order = json.loads(message.value() or b"")
    headers: dict[str, Any] = dict(message.headers() or [])

    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    with Session(engine) as session, session.begin():
        inbox.handle(session, headers["outbox-id"].decode(), GROUP, issue_ticket, topic=TOPIC)


consumer = Consumer(
    {
        "bootstrap.servers": os.environ["KAFKA"],
        "group.id": GROUP,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 10_000,
    }
)
consumer.subscribe([TOPIC])
while True:
    message = consumer.poll(5.0)
    if message is None:
        continue
    if (error := message.error()) is not None:
        raise KafkaException(error)
    issue_ticket_once(message)
    consumer.commit(message=message, asynchronous=False)  # the offset, after the transaction
