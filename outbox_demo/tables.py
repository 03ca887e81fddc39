"""The business tables of the demo: trips, payments, reminders, tickets, notifications."""

from __future__ import annotations

from sqlalchemy import BigInteger, Engine, Index, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

OPEN = "open"
BOOKED = "booked"
CANCELED = "canceled"
PAID = "PAID"


class Base(DeclarativeBase):
    """The base of the demo's tables; their names begin with `demo_`, so that they match no real table by accident."""


class Trip(Base):
    """A flight that can be booked. `departs_at_us` is the real departure, of 2013."""

    __tablename__ = "demo_trip"
    __table_args__ = (Index("ix_demo_trip_status_departs", "status", "departs_at_us"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    carrier: Mapped[str] = mapped_column(String(2))
    flight: Mapped[int] = mapped_column(Integer)
    origin: Mapped[str] = mapped_column(String(3))
    dest: Mapped[str] = mapped_column(String(3))
    departs_at_us: Mapped[int] = mapped_column(BigInteger)
    distance_miles: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(String(8), default=OPEN)


class Payment(Base):
    """A paid trip: every one of these must have its two messages."""

    __tablename__ = "demo_payment"

    order_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    amount_cents: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(String(8))
    paid_at_us: Mapped[int] = mapped_column(BigInteger)


class Reminder(Base):
    """A reminder that a trip's transaction has scheduled, by the id of its message. One that was withdrawn is to be
    delivered only where its cancel came too late.
    """

    __tablename__ = "demo_reminder"

    message_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    order_id: Mapped[int] = mapped_column(Integer, index=True)
    due_at_ms: Mapped[int] = mapped_column(BigInteger)
    is_withdrawn: Mapped[bool] = mapped_column(default=False)


class Ticket(Base):
    """The ticket that the ticketing group issues for a payment, exactly one each."""

    __tablename__ = "demo_ticket"

    order_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    message_id: Mapped[str] = mapped_column(String(64))
    issued_at_us: Mapped[int] = mapped_column(BigInteger)


class Notification(Base):
    """A notification that was sent; without an inbox, one may be sent twice after a failure."""

    __tablename__ = "demo_notification"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    topic: Mapped[str] = mapped_column(String(64))
    order_id: Mapped[int] = mapped_column(Integer)
    message_id: Mapped[str] = mapped_column(String(64))
    notified_at_us: Mapped[int] = mapped_column(BigInteger)


def make_tables(engine: Engine) -> None:
    """Create the tables; drops those of an earlier demo."""
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
