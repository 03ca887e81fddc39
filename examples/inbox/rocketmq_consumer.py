"""A consumer by rocketmq-python-client: a simple consumer of the topic, whose name on RocketMQ has no dots.

    export DATABASE_URL=mysql+pymysql://app@db/shop ROCKETMQ=proxy:8081 ACCESS_KEY=app SECRET_KEY=secret
    python examples/inbox/rocketmq_consumer.py

The group is made before: `mqadmin updateSubGroup -n ns1:9876 -c DefaultCluster -g ticketing`.
"""

import json
import os
import time

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, SimpleConsumer
from rocketmq.v5.exception import InternalErrorException
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

INVISIBLE_SECONDS = 10  # what is not acknowledged is delivered again after this time: longer than the slowest handler

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)


def issue_ticket_once(message: Message) -> None:
    order = json.loads(message.body)

    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    with Session(engine) as session, session.begin():
        inbox.handle(session, message.properties["outbox-id"], GROUP, issue_ticket, topic=TOPIC)


login = Credentials(os.environ.get("ACCESS_KEY", ""), os.environ.get("SECRET_KEY", ""))
configuration = ClientConfiguration(os.environ["ROCKETMQ"], login)
consumer = SimpleConsumer(configuration, GROUP, {TOPIC.replace(".", "_"): FilterExpression()}, await_duration=6)
consumer.startup()
while True:
    try:
        messages = consumer.receive(1, INVISIBLE_SECONDS)
    except InternalErrorException:  # the proxy has not had this client's settings yet, as after each start
        time.sleep(1)
        continue
    for message in messages or []:
        issue_ticket_once(message)
        consumer.ack(message)  # after the commit
