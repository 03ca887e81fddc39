"""A consumer by pika of a queue that is bound by the topic.

export DATABASE_URL=mysql+pymysql://app@db/shop RABBITMQ_URL=amqp://app:secret@mq1 QUEUE=ticketing
python examples/inbox/pika_consumer.py
"""

import json
import os

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


def issue_ticket_once(
    channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes
) -> None:
    order = json.loads(body)

    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    with Session(engine) as session, session.begin():
        inbox.handle(session, properties.message_id, GROUP, issue_ticket, topic=TOPIC)
    channel.basic_ack(method.delivery_tag)  # after the commit


connection = pika.BlockingConnection(pika.URLParameters(os.environ["RABBITMQ_URL"]))
channel = connection.channel()
channel.basic_qos(prefetch_count=10)
channel.basic_consume(os.environ["QUEUE"], issue_ticket_once)
channel.start_consuming()
