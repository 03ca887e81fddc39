"""The processes of the consumer groups: ticketing (with the inbox) and notification (without).

python -m outbox_demo.consumers PLAN.json ticketing|notification
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Consumer, consumer, run_consumers
from outbox.store.database import open_engine
from outbox_core import Delivery, connect
from outbox_demo.plan import NOTIFICATION, PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER, DemoPlan
from outbox_demo.tables import Notification, Ticket


class PrinterJam(Exception):
    """An error of the ticket printer, sometimes, at the first try."""


class UnknownAddress(Exception):
    """A customer who can never be notified."""


def ticketing(plan: DemoPlan, engine: Engine) -> list[Consumer]:
    """Issues one ticket for each payment: the ticket and the inbox row commit together."""

    @consumer(PAYMENT_COMPLETED, group=TICKETING, inbox=engine, invisible_ms=plan.invisible_ms)
    def issue_ticket(session: Session, delivery: Delivery) -> None:
        order_id = _order_id(delivery)
        if delivery.attempt == 1 and order_id % plan.first_try_fails_every == 0:
            raise PrinterJam(f"no paper for order {order_id}")
        session.add(Ticket(order_id=order_id, message_id=delivery.id, issued_at_us=time.time_ns() // 1000))

    return [issue_ticket]


def notification(plan: DemoPlan, engine: Engine) -> list[Consumer]:
    """Notifies the customer of the payment, and of the trip two hours before its departure."""

    def notify(delivery: Delivery) -> None:
        order_id = _order_id(delivery)
        if order_id == plan.poison_order and delivery.topic == PAYMENT_COMPLETED:
            raise UnknownAddress(f"the customer of order {order_id} has no address")
        with Session(engine) as session, session.begin():
            session.add(
                Notification(
                    topic=delivery.topic, order_id=order_id, message_id=delivery.id,
                    notified_at_us=time.time_ns() // 1000,
                )
            )  # fmt: skip

    return [
        consumer(topic, group=NOTIFICATION, invisible_ms=plan.invisible_ms)(notify)
        for topic in (PAYMENT_COMPLETED, TRIP_REMINDER)
    ]


def main(arguments: Sequence[str]) -> None:
    """Run one group until SIGTERM."""
    plan = DemoPlan.read(Path(arguments[0]))
    engine = open_engine(plan.url)
    consumers = {TICKETING: ticketing, NOTIFICATION: notification}[arguments[1]](plan, engine)
    broker = connect(plan.broker_url, timeout_ms=5_000)
    run_consumers(consumers, broker=broker).run_until_signal()
    broker.close()
    engine.dispose()


def _order_id(delivery: Delivery) -> int:
    order: Any = delivery.json()
    return int(order["order_id"])


if __name__ == "__main__":
    main(sys.argv[1:])
