"""The tables of the model's business: payments, and witnesses that stand for messages where none are published."""

from __future__ import annotations

from typing import cast

from sqlalchemy import String, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

STANDING_ROW = -1
"""A payment that is always there: what inserts it again fails, and strangers lock it."""


class Business(DeclarativeBase):
    """The business's tables."""


class Payment(Business):
    """A row of business."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[str] = mapped_column(String(64), default="")


class Witness(Business):
    """What the plain run writes in the place of a message."""

    __tablename__ = "witness"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


PAYMENTS = cast("Table", Payment.__table__)
WITNESSES = cast("Table", Witness.__table__)
