"""Compares the payments with the archive, the inboxes and the effects: what was lost, invented, doubled or early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Engine, func, select

from outbox.store.database import open_engine
from outbox.store.schema import outbox_tables
from outbox_demo.plan import GROUPS, PAYMENT_COMPLETED, TICKETING, TOPICS, DemoPlan, RunTopics
from outbox_demo.tables import Notification, Payment, Ticket

Mark = tuple[str, str, str]
"""Of the inbox: group, topic, message id."""


class FindingKind(StrEnum):
    """The kinds of findings in a run."""

    LOST = "lost"
    """A payment without a message of each topic, or a message that a group has no mark or no effect of."""
    PHANTOM = "phantom"
    """A message without a payment, a mark without a message, an effect without a message."""
    DOUBLED = "doubled"
    """A second message or a second effect of one order."""
    EARLY = "early"
    """An effect before its message's due time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, in words that name the message or the order."""

    kind: FindingKind
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedMessage:
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
    """The records of the databases after a run."""

    payments: frozenset[int]
    archive: Sequence[ArchivedMessage]
    marks: frozenset[Mark]
    effects: Sequence[ObservedEffect]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The numbers of payments, of sent messages and of messages handled by a group; and all findings."""

    payments: int
    messages: int
    delivered: int
    findings: Sequence[Finding]

    @property
    def figures(self) -> Mapping[str, int]:
        """All of it as numbers."""
        counts = Counter(one.kind for one in self.findings)
        return {
            "payments": self.payments, "messages": self.messages, "delivered": self.delivered,
            **{kind.value: counts[kind] for kind in FindingKind},
        }  # fmt: skip


def read_records(engine: Engine, schema: str | None, topics: RunTopics) -> Records:
    """Read all records of a run, by the plain names of its topics."""
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
            ArchivedMessage(id=message_id, topic=topics.plain(topic), order_id=int(key), deliver_at_ms=due_ms)
            for message_id, topic, key, due_ms in sent
        ],
        marks=frozenset((group, topics.plain(topic), message_id) for group, topic, message_id in marks),
        effects=effects,
    )


def count_marks(plan: DemoPlan) -> tuple[int, int]:
    """Returns how many messages the inboxes have marks of, and how many they will have if all that was sent arrives."""
    tables = outbox_tables(plan.schema)
    archive = tables.archive.c
    engine = open_engine(plan.url)
    try:
        with engine.connect() as connection:
            marks = connection.scalar(select(func.count()).select_from(tables.inbox)) or 0
            by_topic = select(archive.topic, func.count(archive.id.distinct())).group_by(archive.topic)
            sent = {row[0]: int(row[1]) for row in connection.execute(by_topic)}
    finally:
        engine.dispose()
    return marks, sum(sent.get(topic, 0) for topic, _ in plan.topics.subscriptions)


def compare(records: Records) -> RunComparison:
    """Compare a run's records, as FindingKind says."""
    messages = {(one.topic, one.id): one for one in records.archive}
    expected = {(group, *key): one for key, one in messages.items() for topic, group in GROUPS if topic == one.topic}
    findings = [
        *_lost(records, expected),
        *_phantoms(records, expected),
        *_doubled(records, messages.values()),
        *_early(records, messages.values()),
    ]
    return RunComparison(
        payments=len(records.payments),
        messages=len(messages),
        delivered=len(expected.keys() & records.marks),
        findings=findings,
    )


def _lost(records: Records, expected: Mapping[Mark, ArchivedMessage]) -> Iterator[Finding]:
    sent = {(one.topic, one.order_id) for one in records.archive}
    for topic, order in sorted({(topic, order) for topic in TOPICS for order in records.payments} - sent):
        yield Finding(FindingKind.LOST, f"no {topic} was sent for the payment of order {order}")
    effects = {(one.group, one.topic, one.order_id) for one in records.effects}
    for (group, topic, message_id), message in expected.items():
        what = f"message {message_id} ({topic}, order {message.order_id})"
        if (group, topic, message_id) not in records.marks:
            yield Finding(FindingKind.LOST, f"{what} never came to {group}: it has no mark in the inbox")
        elif (group, topic, message.order_id) not in effects:
            yield Finding(FindingKind.LOST, f"{what} has a mark of {group} in the inbox, but no effect")


def _phantoms(records: Records, expected: Mapping[Mark, ArchivedMessage]) -> Iterator[Finding]:
    sent = {(one.topic, one.order_id) for one in records.archive}
    for topic, order in sorted(one for one in sent if one[1] not in records.payments):
        yield Finding(FindingKind.PHANTOM, f"a {topic} was sent for order {order}, which has no payment")
    for group, topic, message_id in sorted(records.marks - expected.keys()):
        yield Finding(FindingKind.PHANTOM, f"{group} has a mark of message {message_id} ({topic}) that was not sent")
    for group, topic, order in sorted({(one.group, one.topic, one.order_id) for one in records.effects}):
        if (topic, order) not in sent:
            yield Finding(
                FindingKind.PHANTOM, f"{group} has an effect of a {topic} for order {order} that was not sent"
            )


def _doubled(records: Records, messages: Iterable[ArchivedMessage]) -> Iterator[Finding]:
    sent = Counter((one.topic, one.order_id) for one in messages)
    for (topic, order), count in sent.items():
        for _ in range(count - 1):
            yield Finding(FindingKind.DOUBLED, f"one more {topic} was sent for order {order}")
    effects = Counter((one.group, one.topic, one.order_id) for one in records.effects)
    for (group, topic, order), count in effects.items():
        for _ in range(count - 1):
            yield Finding(FindingKind.DOUBLED, f"{group} has one more effect of {topic} for order {order}")


def _early(records: Records, messages: Iterable[ArchivedMessage]) -> Iterator[Finding]:
    due_us = {(one.topic, one.order_id): one.deliver_at_ms * 1_000 for one in messages if one.deliver_at_ms is not None}
    for one in records.effects:
        before_us = due_us.get((one.topic, one.order_id), 0) - one.at_us
        if before_us > 0:
            yield Finding(FindingKind.EARLY, f"{one.topic} of order {one.order_id} was {before_us:,} us early")
