"""The README's first screen, as a program: pay for an order, and find its message at the broker.

python examples/quickstart.py
"""

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Outbox
from outbox.migrating import upgrade


class Base(DeclarativeBase): ...


class Payment(Base):
    __tablename__ = "payment"
    order_id: Mapped[int] = mapped_column(primary_key=True)


engine = create_engine("sqlite:///shop.db")  # or mysql+pymysql://app@db/shop
upgrade(engine)  # the outbox's own three tables
Base.metadata.create_all(engine)

with Outbox(engine, broker="embedded:./broker-data") as box:  # or http://broker:7788

    @box.transactional
    def pay(session: Session, order_id: int) -> None:
        session.add(Payment(order_id=order_id))
        box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))

    pay(1)  # committed: sent. Raised: neither row nor message, savepoints included.

    box.close()  # everything committed so far is at the broker now
    for delivery in box.broker.pull("payment.completed", "printer"):
        print(delivery.topic, delivery.json())
        box.broker.ack([delivery.receipt])

box.broker.close()
