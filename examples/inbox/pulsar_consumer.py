"""A consumer by pulsar-client: a shared subscription of the topic.

DATABASE_URL=mysql+pymysql://app@db/shop PULSAR_URL=pulsar://pulsar:6650 python examples/inbox/pulsar_consumer.py
"""

import json
import os

import pulsar
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


def issue_ticket_once(message: pulsar.Message) -> None:
    order = json.loads(message.data())

    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    with Session(engine) as session, session.begin():
        inbox.handle(session, message.properties()["outbox-id"], GROUP, issue_ticket, topic=TOPIC)


client = pulsar.Client(os.environ["PULSAR_URL"])
# The subscription was made before the first message was published: Pulsar keeps nothing for those that come later.
consumer = client.subscribe(TOPIC, GROUP, consumer_type=pulsar.ConsumerType.Shared)
try:
    while True:
        message = consumer.receive()
        issue_ticket_once(message)
        consumer.acknowledge(message)  # after the commit
finally:
    client.shutdown()  # before the interpreter ends, whose threads it uses
