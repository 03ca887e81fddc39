"""Compares the payments with the archive, the inboxes and the effects: what was lost, invented, doubled or early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine, select

from outbox.store.schema import outbox_tables
from outbox_demo.plan import GROUPS, PAYMENT_COMPLETED, TICKETING, TOPICS
from outbox_demo.tables import Notification, Payment, Ticket

FATAL: Final = ("lost", "phantom", "doubled", "early")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """A message that left the outbox: its id, topic, order, and due time in ms, None where it was for now."""

    id: str
    topic: str
    order_id: int
    deliver_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEffect:
    """A row that a group's handler wrote for an order's message of a topic, and when."""

    group: str
    topic: str
    order_id: int
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What the databases say after a run. `marks` are (group, topic, message id) of the inbox."""

    payments: frozenset[int]
    archive: Sequence[Archived]
    marks: frozenset[tuple[str, str, str]]
    effects: Sequence[ObservedEffect]


def read_records(engine: Engine, schema: str | None) -> Records:
    """Read all records of a run."""
    tables = outbox_tables(schema)
    archive, inbox = tables.archive.c, tables.inbox.c
    with engine.connect() as connection:
        sent = connection.execute(select(archive.id, archive.topic, archive.message_key, archive.deliver_at_ms)).all()
        tickets = connection.execute(select(Ticket.order_id, Ticket.issued_at_us)).all()
        told = connection.execute(select(Notification.topic, Notification.order_id, Notification.notified_at_us)).all()
        marks = connection.execute(select(inbox.consumer_group, inbox.topic, inbox.message_id)).all()
        payments = frozenset(connection.scalars(select(Payment.order_id)))
    [notification] = {group for _, group in GROUPS} - {TICKETING}
    effects = [
        ObservedEffect(group=TICKETING, topic=PAYMENT_COMPLETED, order_id=order, at_us=at_us)
        for order, at_us in tickets
    ]
    effects += [
        ObservedEffect(group=notification, topic=topic, order_id=order, at_us=at_us) for topic, order, at_us in told
    ]
    return Records(
        payments=payments,
        archive=[
            Archived(id=message_id, topic=topic, order_id=int(key), deliver_at_ms=due_ms)
            for message_id, topic, key, due_ms in sent
        ],
        marks=frozenset((group, topic, message_id) for group, topic, message_id in marks),
        effects=effects,
    )


def compare(records: Records) -> Mapping[str, int]:
    """Returns how many messages were sent and handled, and how many were lost, phantom, doubled and early.

    lost: a payment without a message of each topic, or a message that a group has no mark or no effect of. phantom: a
    message without a payment, a mark without a message, an effect without a message. doubled: a second message or a
    second effect of one order. early: an effect before its message's due time.
    """
    messages = {(one.topic, one.id): one for one in records.archive}
    sent = Counter((one.topic, one.order_id) for one in messages.values())
    effects = Counter((one.group, one.topic, one.order_id) for one in records.effects)
    expected = {(group, *key): one for key, one in messages.items() for topic, group in GROUPS if topic == one.topic}
    announced = {(topic, order) for topic in TOPICS for order in records.payments}
    return {
        "payments": len(records.payments),
        "messages": len(messages),
        "delivered": len(expected.keys() & records.marks),
        "lost": len(announced - sent.keys())
        + sum(
            mark not in records.marks or (mark[0], one.topic, one.order_id) not in effects
            for mark, one in expected.items()
        ),
        "phantom": len(sent.keys() - announced)
        + len(records.marks - expected.keys())
        + sum(effect[1:] not in sent for effect in effects),
        "doubled": sum(count - 1 for count in (*sent.values(), *effects.values())),
        "early": sum(1 for _ in _early(records, messages.values())),
    }


def _early(records: Records, messages: Iterable[Archived]) -> Iterator[ObservedEffect]:
    due_us = {(one.topic, one.order_id): one.deliver_at_ms * 1_000 for one in messages if one.deliver_at_ms is not None}
    return (one for one in records.effects if one.at_us < due_us.get((one.topic, one.order_id), 0))
