"""A consumer whose effect happens once, however often its message is delivered.

Its handler fails once on purpose: the log shows the traceback, and the message is delivered again.

python examples/inbox_consumer.py
"""

import threading

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Delivery, Outbox, connect, consumer, run_consumers
from outbox.migrate import upgrade


class Base(DeclarativeBase): ...


class Ticket(Base):
    __tablename__ = "ticket"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


engine = create_engine("sqlite:///tickets.db")
upgrade(engine)
Base.metadata.create_all(engine)
broker = connect("embedded:./broker-data")
both_tried = threading.Semaphore(0)


@consumer("payment.completed", group="ticketing", inbox=engine)
def issue_ticket(session: Session, delivery: Delivery) -> None:
    order = delivery.json()
    session.add(Ticket(order_id=order["order_id"]))
    both_tried.release()
    if order["order_id"] == 2 and delivery.attempt == 1:
        raise RuntimeError("the printer jams: rolled back, and delivered again after a second")


with Outbox(engine, broker=broker) as box:

    @box.transactional
    def pay(_session: Session, order_id: int) -> None:
        box.publish("payment.completed", {"order_id": order_id})

    pay(1)
    pay(2)

    runner = run_consumers([issue_ticket], broker=broker)
    for _ in range(3):  # order 1 once, order 2 twice
        both_tried.acquire(timeout=30)
    runner.stop()

with Session(engine) as session:
    print("tickets:", session.scalar(select(func.count()).select_from(Ticket)))
broker.close()
