"""A reminder in a year's time, and what happens when the trip is called off.

python examples/schedule_and_cancel.py
"""

from datetime import timedelta

from sqlalchemy.orm import Session

from outbox import Message, Outbox, connect
from outbox.migrate import upgrade

upgrade("sqlite:///trips.db")
broker = connect("embedded:./broker-data")
box = Outbox("sqlite:///trips.db", broker=broker)


@box.transactional
def book(_session: Session, trip: str) -> Message:
    return box.publish("trip.reminder", {"trip": trip}, key=trip, delay=timedelta(days=365))


@box.transactional
def call_off(_session: Session, reminder_id: str) -> None:
    box.cancel(reminder_id)


kept, dropped = book("AA100"), book("BA200")
call_off(dropped.id)
box.close()  # sent by now

print("still scheduled:", broker.admin.figures("trip.reminder")["scheduled"])
broker.close()
