"""Celery tasks for the messages of a RabbitMQ queue that is bound by the topic.

What the outbox publishes is no task of Celery. A step of the worker consumes the queue beside that of the tasks, and
enqueues a task for each message, with the message's id. The message is acknowledged after RabbitMQ has confirmed the
task, and the task, by `task_acks_late`, after its commit: each is in one of the two queues, and the inbox drops what
was enqueued twice.

    export DATABASE_URL=mysql+pymysql://app@db/shop RABBITMQ_URL=amqp://app:secret@mq1 QUEUE=ticketing
    celery --workdir examples/inbox -A celery_rabbitmq worker
"""

import json
import os
from typing import Any

import kombu
from celery import Celery, bootsteps
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
app = Celery("celery_rabbitmq", broker=os.environ["RABBITMQ_URL"])
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1)
app.conf.broker_transport_options = {"confirm_publish": True}


# A task whose commit fails is tried again, for as long as it takes.
@app.task(  # type: ignore[untyped-decorator]
    ignore_result=True, autoretry_for=(Exception,), max_retries=None, retry_backoff=True, retry_backoff_max=60
)
def issue_ticket_once(message_id: str, order_id: int) -> None:
    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order_id))

    with Session(engine) as session, session.begin():
        inbox.handle(session, message_id, GROUP, issue_ticket, topic=TOPIC)


class MessageReader(bootsteps.ConsumerStep):  # type: ignore[misc]
    def get_consumers(self, channel: Any) -> list[Any]:
        queue = kombu.Queue(os.environ["QUEUE"], no_declare=True)
        return [kombu.Consumer(channel, [queue], on_message=self.enqueue_task, prefetch_count=10)]

    def enqueue_task(self, message: Any) -> None:
        order = json.loads(message.body)
        issue_ticket_once.delay(message.properties["message_id"], order["order_id"])
        message.ack()  # after the confirm of the task


app.steps["consumer"].add(MessageReader)
