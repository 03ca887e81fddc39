"""A consumer by redis-py: a group of the topic's stream.

DATABASE_URL=mysql+pymysql://app@db/shop REDIS_URL=redis://redis:6379 python examples/inbox/redis_py.py
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tickets import GROUP, TOPIC, Ticket

from outbox import Inbox

STREAM = f"outbox:{{{TOPIC}}}"
CONSUMER = "ticketing-1"  # one name for each process of the group
IDLE_MS = 10_000  # what is not acknowledged is read again after this time: longer than the slowest handler

engine = create_engine(os.environ["DATABASE_URL"])
inbox = Inbox(engine)
client: Any = redis.Redis.from_url(os.environ["REDIS_URL"], protocol=2)


def issue_ticket_once(fields: dict[bytes, bytes]) -> None:
    order = json.loads(fields[b"body"])

    def issue_ticket(session: Session) -> None:
        session.add(Ticket(order_id=order["order_id"]))

    with Session(engine) as session, session.begin():
        inbox.handle(session, fields[b"id"].decode(), GROUP, issue_ticket, topic=TOPIC)


def entries() -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """What a dead consumer of the group has left, then what is new."""
    while True:
        _, left, _ = client.xautoclaim(STREAM, GROUP, CONSUMER, min_idle_time=IDLE_MS, count=1)
        yield from left
        for _, new in client.xreadgroup(GROUP, CONSUMER, {STREAM: ">"}, count=1, block=1_000) or []:
            yield from new


if not client.exists(STREAM) or GROUP.encode() not in [group["name"] for group in client.xinfo_groups(STREAM)]:
    client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
for place, fields in entries():
    issue_ticket_once(fields)
    client.xack(STREAM, GROUP, place)  # after the commit
