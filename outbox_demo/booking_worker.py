"""The process of the booking worker: books open trips by transactional business functions until none is left.

python -m outbox_demo.booking_worker PLAN.json [--pause-before-send-after N]
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from outbox import Outbox, SenderLimits
from outbox_core import Broker, CancelStatus, Message, PublishResult, connect
from outbox_demo.plan import PAUSED_LINE, PAYMENT_COMPLETED, TRIP_REMINDER, DemoPlan
from outbox_demo.tables import BOOKED, OPEN, PAID, Payment, Trip

TRIPS_AT_ONCE = 500


class DoubtfulCard(Exception):
    """An error of the business after it has published: the transaction must roll back."""


class BookingWorker:
    """Books trips; every `fails_every`-th call of its business function fails at its end."""

    def __init__(self, plan: DemoPlan, *, broker: Broker) -> None:
        self._plan = plan
        self._calls = 0
        self.box = Outbox(
            plan.url,
            broker=broker,
            schema=plan.schema,
            sender=SenderLimits(lease_ms=plan.lease_ms, lease_margin_ms=plan.lease_ms // 2),
        )
        self.pay = self.box.transactional(self._pay)

    def run(self) -> None:
        """Book until no trip of the plan is open; retries trips that were rolled back."""
        while trips := self._open_trips():
            for trip_id in trips:
                try:
                    self.pay(trip_id)
                except DoubtfulCard:
                    self._note_rolled_back(trip_id)

    def _pay(self, session: Session, trip_id: int) -> None:
        """The business function: a payment, a booked trip, a message now and one two hours before departure."""
        self._calls += 1
        trip = session.get_one(Trip, trip_id)
        session.add(
            Payment(
                order_id=trip.id,
                amount_cents=2_000 + 11 * trip.distance_miles,
                status=PAID,
                paid_at_us=time.time_ns() // 1000,
            )
        )
        session.execute(update(Trip).where(Trip.id == trip_id).values(status=BOOKED))
        order = {"order_id": trip.id, "flight": f"{trip.carrier}{trip.flight}", "from": trip.origin, "to": trip.dest}
        self.box.publish(self._plan.topics.full(PAYMENT_COMPLETED), order, key=str(trip.id))
        self.box.publish(
            self._plan.topics.full(TRIP_REMINDER), order, key=str(trip.id),
            deliver_at=self._plan.clock.reminder_at(trip.departs_at_us),
        )  # fmt: skip
        if self._calls % self._plan.fails_every == 0:
            raise DoubtfulCard(f"the card of order {trip.id} was refused")

    def _open_trips(self) -> list[int]:
        statement = (
            select(Trip.id)
            .where(Trip.status == OPEN, Trip.departs_at_us.between(self._plan.first_us, self._plan.last_us))
            .order_by(Trip.departs_at_us, Trip.id)
            .limit(TRIPS_AT_ONCE)
        )
        with Session(self.box.engine) as session:
            return list(session.scalars(statement))

    def _note_rolled_back(self, trip_id: int) -> None:
        with self._plan.rolled_back_path.open("a") as file:
            file.write(f"{trip_id}\n")


class PausingBroker:
    """A Broker that from its N-th message on prints a line and sends nothing: it stops the worker between commit and
    send.
    """

    def __init__(self, broker: Broker, *, after: int) -> None:
        self._broker = broker
        self._left = after

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Publish, or wait forever."""
        self._left -= len(batch)
        if self._left < 0:
            print(PAUSED_LINE, flush=True)  # noqa: T201 - the process that kills us waits for this line
            threading.Event().wait()
        return self._broker.publish(batch)

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel by the wrapped broker."""
        return self._broker.cancel(message_ids)

    def __getattr__(self, name: str) -> object:
        return getattr(self._broker, name)


def main(arguments: Sequence[str]) -> None:
    """Run the worker that a plan describes."""
    plan = DemoPlan.read(Path(arguments[0]))
    broker: Broker = connect(plan.broker_url, timeout_ms=plan.lease_ms // 3)
    if len(arguments) == 3 and arguments[1] == "--pause-before-send-after":
        broker = PausingBroker(broker, after=int(arguments[2]))  # type: ignore[assignment]
    worker = BookingWorker(plan, broker=broker)
    worker.run()
    worker.box.close()


if __name__ == "__main__":
    main(sys.argv[1:])
