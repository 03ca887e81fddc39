"""The process of the booking worker: books open trips by transactional business functions until none is left, and has
some of them canceled or moved.

python -m outbox_demo.booking_worker PLAN.json [--pause-before-send-after N]
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from outbox import Outbox, SenderLimits
from outbox_core import Broker, CancelStatus, Message, PublishResult, connect
from outbox_demo.plan import PAUSED_LINE, PAYMENT_COMPLETED, TRIP_REMINDER, DemoPlan
from outbox_demo.planned_trip_changes import TripChange, change_of, changed_reminder_at
from outbox_demo.tables import BOOKED, CANCELED, OPEN, PAID, Payment, Reminder, Trip

TRIPS_AT_ONCE = 500
CHANGED_AFTER_TRIPS = 20
"""So many trips are booked between the booking of a trip and its change."""


class DoubtfulCard(Exception):
    """An error of the business after it has published: the transaction must roll back."""


class BookingWorker:
    """Books trips; every `fails_every`-th call of its business functions fails at its end."""

    def __init__(self, plan: DemoPlan, *, broker: Broker) -> None:
        self._plan = plan
        self._calls = 0
        self._booked: deque[int] = deque()
        self.box = Outbox(
            plan.url,
            broker=broker,
            sender=SenderLimits(lease_ms=plan.lease_ms, lease_margin_ms=plan.lease_ms // 2),
            timing=plan.timing_url,
        )
        self.pay = self.box.transactional(self._pay)
        self.change = self.box.transactional(self._change)

    def run(self) -> None:
        """Book until no trip of the plan is open; retries trips that were rolled back, but no changes of trips."""
        while trips := self._open_trips():
            for trip_id in trips:
                if self._committed(partial(self.pay, trip_id), trip_id):
                    self._booked.append(trip_id)
                self._change_booked(keeping=CHANGED_AFTER_TRIPS)
        self._change_booked(keeping=0)

    def _pay(self, session: Session, trip_id: int) -> None:
        """A business function: a payment, a booked trip, a message now and one two hours before departure."""
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
        self.box.publish(self._plan.topics.full(PAYMENT_COMPLETED), _order(trip), key=str(trip.id))
        self._remind(session, trip, self._plan.clock.reminder_at(trip.departs_at_us))
        self._fail_sometimes(trip)

    def _change(self, session: Session, trip_id: int, change: TripChange) -> None:
        """A business function: the trip is canceled, or departs at another time, and so its reminder is withdrawn."""
        trip = session.get_one(Trip, trip_id)
        standing = select(Reminder).where(Reminder.order_id == trip_id, Reminder.is_withdrawn.is_(False))
        reminder = session.scalars(standing).one()
        reminder.is_withdrawn = True
        self.box.cancel(reminder.message_id)
        due_at = changed_reminder_at(change, departs_at_us=trip.departs_at_us, clock=self._plan.clock)
        if due_at is None:
            trip.status = CANCELED
        else:
            self._remind(session, trip, due_at)
        self._fail_sometimes(trip)

    def _remind(self, session: Session, trip: Trip, due_at: datetime) -> None:
        topic = self._plan.topics.full(TRIP_REMINDER)
        message = self.box.publish(topic, _order(trip), key=str(trip.id), deliver_at=due_at)
        session.add(
            Reminder(message_id=message.id, order_id=trip.id, due_at_ms=message.deliver_at_ms, is_withdrawn=False)
        )

    def _fail_sometimes(self, trip: Trip) -> None:
        self._calls += 1
        if self._calls % self._plan.fails_every == 0:
            raise DoubtfulCard(f"the card of order {trip.id} was refused")

    def _change_booked(self, *, keeping: int) -> None:
        """Change the trips that were booked first, but for the last few: their messages shall have gone before."""
        while len(self._booked) > keeping:
            trip_id = self._booked.popleft()
            change = change_of(trip_id) if self._plan.has_changes else None
            if change is not None:
                self._committed(partial(self.change, trip_id, change), trip_id)

    def _committed(self, call: Callable[[], None], trip_id: int) -> bool:
        try:
            call()
        except DoubtfulCard:
            self._note_rolled_back(trip_id)
            return False
        return True

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


def _order(trip: Trip) -> dict[str, object]:
    return {"order_id": trip.id, "flight": f"{trip.carrier}{trip.flight}", "from": trip.origin, "to": trip.dest}


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
