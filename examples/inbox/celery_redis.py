"""Celery tasks for the messages of a Redis stream.

What the outbox publishes is no task of Celery. A reader of the stream enqueues a task for each message, with the
message's id, once; the task acknowledges the message after its commit. What is not acknowledged is enqueued again when
no task waits in Celery's queue any more, whether the reader, a worker, or the task itself got lost: a message waits in
its stream, not in Celery's queue, from which a worker of Celery on Redis takes tasks that nobody has if it dies. The
inbox drops what was enqueued twice for that: a task that a worker has taken, and not begun for IDLE_MS.

    export DATABASE_URL=mysql+pymysql://app@db/shop REDIS_URL=redis://redis:6379
    python examples/inbox/celery_redis.py
    celery --workdir examples/inbox -A celery_redis worker
"""

import json
import os
from typing import Any

import redis
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

STREAM = f"outbox:{{{TOPIC}}}"
QUEUE = "tickets"  # for these tasks alone: what waits in it was not lost
IDLE_MS = 10_000  # what is not acknowledged is enqueued again after this time: longer than a task takes

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
client: Any = redis.Redis.from_url(os.environ["REDIS_URL"], protocol=2)
app = Celery("celery_redis", broker=os.environ["REDIS_URL"])
app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=1)


@app.task(ignore_result=True)  # type: ignore[untyped-decorator]
def issue_ticket_once(message_id: str, order_id: int, place: str) -> None:
    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order_id))

    client.xclaim(STREAM, GROUP, "worker", min_idle_time=0, message_ids=[place], justid=True)  # begun: idle from now on
    with Session(engine) as session, session.begin():
        inbox.handle(session, message_id, GROUP, issue_ticket, topic=TOPIC)
    client.xack(STREAM, GROUP, place)  # after the commit


def enqueue_tasks() -> None:
    if not client.exists(STREAM) or GROUP.encode() not in [group["name"] for group in client.xinfo_groups(STREAM)]:
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    while True:
        left = []
        if not client.llen(QUEUE):
            _, left, _ = client.xautoclaim(STREAM, GROUP, "reader-1", min_idle_time=IDLE_MS, count=100)
        read = client.xreadgroup(GROUP, "reader-1", {STREAM: ">"}, count=100, block=1_000) or []
        for place, fields in [*left, *(entry for _, entries in read for entry in entries)]:
            order = json.loads(fields[b"body"])
            issue_ticket_once.delay(fields[b"id"].decode(), order["order_id"], place.decode())


if __name__ == "__main__":
    enqueue_tasks()
