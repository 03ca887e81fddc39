"""The business of the consumers in this folder: one ticket for each payment. Makes its tables when it is run.

python examples/inbox/tickets.py
"""

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox.migrate import upgrade

TOPIC = "payment.completed"
GROUP = "ticketing"


class Base(DeclarativeBase): ...


class Ticket(Base):
    __tablename__ = "ticket"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


if __name__ == "__main__":
    engine = create_engine(os.environ["DATABASE_URL"])
    upgrade(engine)
    Base.metadata.create_all(engine)
