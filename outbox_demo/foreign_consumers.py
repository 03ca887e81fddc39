"""A consumer group on another broker, a process: its plain client, and an Inbox in the transaction of each effect.

python -m outbox_demo.foreign_consumers PLAN.json ticketing|notification
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy.orm import Session

from outbox import Inbox, Outcome
from outbox.store.database import open_engine
from outbox_demo.foreign_client_port import ReceivedMessage, open_client
from outbox_demo.plan import NOTIFICATION, TICKETING, DemoPlan
from outbox_demo.tables import Notification, Ticket


def issue_ticket(message: ReceivedMessage, topic: str, session: Session) -> None:
    """One ticket for a payment."""
    del topic
    session.add(Ticket(order_id=_order_id(message), message_id=message.id, issued_at_us=time.time_ns() // 1000))


def notify(message: ReceivedMessage, topic: str, session: Session) -> None:
    """Notify the customer of the payment, or of the trip before it departs."""
    session.add(
        Notification(
            topic=topic, order_id=_order_id(message), message_id=message.id, notified_at_us=time.time_ns() // 1000
        )
    )


EFFECTS: dict[str, Callable[[ReceivedMessage, str, Session], None]] = {TICKETING: issue_ticket, NOTIFICATION: notify}


def main(arguments: Sequence[str]) -> None:
    """Run one group until the process is ended."""
    plan, group = DemoPlan.read(Path(arguments[0])), arguments[1]
    engine = open_engine(plan.url)
    inbox = Inbox(engine)
    client = open_client(plan.broker_url, plan.topics)
    for message in client.deliveries(group):
        with Session(engine) as session, session.begin():
            effect = partial(EFFECTS[group], message, plan.topics.plain(message.topic))
            outcome = inbox.handle(session, message.id, group, effect, topic=message.topic)
        if outcome is Outcome.DEDUPLICATED:
            with plan.deduplicated_path.open("a") as file:
                file.write(f"{group} {message.topic} {message.id}\n")
        client.acknowledge(message)


def _order_id(message: ReceivedMessage) -> int:
    return int(msgspec.json.decode(message.body)["order_id"])


if __name__ == "__main__":
    main(sys.argv[1:])
