"""A consumer process that kills itself at a named step of a delivery's journey. Run as a module; not imported.

Arguments: `POINT URL SCHEMA BROKER_URL INVISIBLE_MS`. It handles three messages, the first one well, and
dies while the second one is at the point.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from broker_adapter.embedded import EmbeddedBroker
from outbox import consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import RunnerTimes
from outbox_core import AckStatus, Delivery
from tests.outbox.shop import Payment

SECOND = b"2"


def die(*_: Any) -> None:
    """As by `kill -9`: nothing is flushed, closed or told."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingBroker(EmbeddedBroker):
    """The embedded broker, with a death after a pull, or around the ack that has the second message."""

    point = ""
    acks = 0

    def pull(self, topic: str, group: str, **options: Any) -> list[Delivery]:
        found = super().pull(topic, group, **options)
        if self.point == "pulled" and found:
            die()
        return found

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        self.acks += len(receipts)
        if self.point == "committed" and self.acks >= 2:
            die()
        statuses = super().ack(receipts)
        if self.point == "acked" and self.acks >= 2:
            die()
        return statuses


def main() -> None:
    """Consume until death."""
    point, url, schema, broker_url, invisible_ms = sys.argv[1:6]
    engine = create_engine(url)
    broker = DyingBroker(broker_url)
    broker.point = point

    @consumer("orders", group="payments", inbox=engine, schema=schema or None, invisible_ms=int(invisible_ms))
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body)))
        session.flush()
        if one.body != SECOND:
            return
        match point:
            case "effect done":
                die()
            case "before commit":
                event.listen(engine, "commit", die)
            case "after commit":
                event.listen(session, "after_commit", die)

    ConsumerRunner([pay], broker=broker, times=RunnerTimes(ack_delay_ms=0)).start()
    threading.Event().wait(300)


main()
