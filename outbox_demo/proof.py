"""Compares what the business has committed with the archive, the inboxes and the effects: what was lost, invented,
doubled, early, or delivered although it had been canceled.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from sqlalchemy import Connection, Table, select

from outbox.store.database import background_engine, open_engine
from outbox.store.schema import RowKind, outbox_tables
from outbox.store.table_placement import table_namespace
from outbox_core import CancelStatus
from outbox_demo.plan import GROUPS, NOTIFICATION, PAYMENT_COMPLETED, TICKETING, TRIP_REMINDER, DemoPlan, RunTopics
from outbox_demo.tables import Notification, Payment, Reminder, Ticket

Mark = tuple[str, str, str]
"""Of the inbox: group, topic, message id."""


class FindingKind(StrEnum):
    """The kinds of findings in a run."""

    LOST = "lost"
    """A payment without its message; a message that a group has no mark or no effect of, and that was not canceled and
    does not wait; a cancel without a result.
    """
    PHANTOM = "phantom"
    """A message without a payment, a mark without a message, an effect without a message."""
    DOUBLED = "doubled"
    """A second message or a second effect of one order."""
    EARLY = "early"
    """An effect before its message's due time."""
    REVIVED = "revived"
    """A message that was delivered although its cancel was answered with `canceled`."""


class Fate(StrEnum):
    """What has become of a message for one of its groups, if it is not lost."""

    DELIVERED = "delivered"
    CANCELED = "canceled"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, in words that name the message or the order."""

    kind: FindingKind
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SentMessage:
    """A message that left the outbox, or waits in it: its id, topic, order, and due time in ms, None where it was for
    now.
    """

    id: str
    topic: str
    order_id: int
    deliver_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEffect:
    """A row that a group's handler wrote for an order's message of a topic, and when."""

    group: str
    topic: str
    message_id: str
    order_id: int
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of the databases after a run.

    `reminders`: the order of each reminder that the business has scheduled, by message id; `withdrawals`: the result of
    the cancel of those that it has withdrawn, None where there is none; `pending`: ids of messages that wait.
    """

    payments: frozenset[int]
    reminders: Mapping[str, int]
    sent: Sequence[SentMessage]
    marks: frozenset[Mark]
    effects: Sequence[ObservedEffect]
    withdrawals: Mapping[str, CancelStatus | None] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()

    def fate(self, mark: Mark) -> Fate | None:
        """Returns what has become of a message for a group; None: it is lost.

        A cancel that came before its message is answered with `unknown`, and then holds for a week.
        """
        _, _, message_id = mark
        if mark in self.marks:
            return Fate.DELIVERED
        if self.withdrawals.get(message_id) in {CancelStatus.CANCELED, CancelStatus.UNKNOWN}:
            return Fate.CANCELED
        return Fate.PENDING if message_id in self.pending else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The numbers of payments, of sent messages and reminders; of messages by what has become of them, counted once for
    each group that reads them; and all findings.
    """

    payments: int
    messages: int
    reminders: int
    fates: Mapping[Fate, int]
    findings: Sequence[Finding]

    @property
    def figures(self) -> Mapping[str, int]:
        """All of it as numbers."""
        counts = Counter(finding.kind for finding in self.findings)
        return {
            "payments": self.payments, "messages": self.messages, "reminders": self.reminders,
            **{fate.value: self.fates.get(fate, 0) for fate in Fate},
            **{kind.value: counts[kind] for kind in FindingKind},
        }  # fmt: skip


def compare_run(plan: DemoPlan) -> RunComparison:
    """Read the records of a run and compare them."""
    with connected(plan) as connection:
        return compare(_read_records(connection, plan))


def later_reminders(plan: DemoPlan) -> list[str]:
    """Returns the ids of the reminders that are due after the run, and were not withdrawn."""
    later = select(Reminder.message_id).where(Reminder.due_at_ms >= plan.later_ms, Reminder.is_withdrawn.is_(False))
    with connected(plan) as connection:
        return list(connection.scalars(later))


@contextmanager
def connected(plan: DemoPlan) -> Iterator[Connection]:
    """A connection to the run's database, for the length of a block."""
    engine = open_engine(plan.url)
    background = background_engine(engine)
    try:
        with background.connect() as connection:
            yield connection
    finally:
        background.dispose()
        engine.dispose()


def _read_records(connection: Connection, plan: DemoPlan) -> Records:
    """Read all records of a run, by the plain names of its topics."""
    tables, topics = outbox_tables(table_namespace(connection.dialect, None)), plan.topics
    inbox = tables.inbox.c
    marks = connection.execute(select(inbox.consumer_group, inbox.topic, inbox.message_id)).all()
    reminders = connection.execute(select(Reminder.message_id, Reminder.order_id, Reminder.is_withdrawn)).all()
    withdrawn = [message_id for message_id, _, is_withdrawn in reminders if is_withdrawn]
    return Records(
        payments=frozenset(connection.scalars(select(Payment.order_id))),
        reminders={message_id: order_id for message_id, order_id, _ in reminders},
        sent=[*_sent(connection, tables.archive, topics), *_sent(connection, tables.message, topics)],
        marks=frozenset((group, topics.plain(topic), message_id) for group, topic, message_id in marks),
        effects=list(_effects(connection)),
        withdrawals=_results(connection, tables.archive, withdrawn),
        pending=frozenset(plan.pending_path.read_text().split()) if plan.pending_path.exists() else frozenset(),
    )


def _sent(connection: Connection, table: Table, topics: RunTopics) -> Iterator[SentMessage]:
    """The messages in the archive, or in the message table."""
    columns = (table.c.id, table.c.topic, table.c.message_key, table.c.deliver_at_ms)
    query = select(*columns).where(table.c.kind == RowKind.PUBLISH.value)
    for message_id, topic, key, due_ms in connection.execute(query).all():
        yield SentMessage(id=message_id, topic=topics.plain(topic), order_id=int(key), deliver_at_ms=due_ms)


def _results(connection: Connection, archive: Table, withdrawn: Iterable[str]) -> dict[str, CancelStatus | None]:
    """The results of the cancels of messages. The archive has no bodies, only their checksums; a cancel's body is the
    id of its message.
    """
    cancels = select(archive.c.body_sha256, archive.c.outcome).where(archive.c.kind == RowKind.CANCEL.value)
    results = {digest: CancelStatus(outcome) for digest, outcome in connection.execute(cancels).all()}
    return {message_id: results.get(hashlib.sha256(message_id.encode()).hexdigest()) for message_id in withdrawn}


def _effects(connection: Connection) -> Iterator[ObservedEffect]:
    tickets = select(Ticket.message_id, Ticket.order_id, Ticket.issued_at_us)
    for message_id, order_id, at_us in connection.execute(tickets).all():
        yield ObservedEffect(
            group=TICKETING, topic=PAYMENT_COMPLETED, message_id=message_id, order_id=order_id, at_us=at_us
        )
    notices = select(Notification.topic, Notification.message_id, Notification.order_id, Notification.notified_at_us)
    for topic, message_id, order_id, at_us in connection.execute(notices).all():
        yield ObservedEffect(group=NOTIFICATION, topic=topic, message_id=message_id, order_id=order_id, at_us=at_us)


def compare(records: Records) -> RunComparison:
    """Compare a run's records, as FindingKind says."""
    messages = {(message.topic, message.id): message for message in records.sent}
    expected = {
        (group, *key): message for key, message in messages.items() for topic, group in GROUPS if topic == message.topic
    }
    fates = Counter(fate for mark in expected if (fate := records.fate(mark)) is not None)
    findings = [
        *_lost(records, expected),
        *_phantoms(records, expected),
        *_doubled(records, messages.values()),
        *_early(records, messages.values()),
        *_revived(records),
    ]
    return RunComparison(
        payments=len(records.payments),
        messages=len(messages),
        reminders=len(records.reminders),
        fates=fates,
        findings=findings,
    )


def _lost(records: Records, expected: Mapping[Mark, SentMessage]) -> Iterator[Finding]:
    announced = {message.order_id for message in records.sent if message.topic == PAYMENT_COMPLETED}
    for order in sorted(records.payments - announced):
        yield Finding(FindingKind.LOST, f"no {PAYMENT_COMPLETED} was sent for the payment of order {order}")
    sent = {message.id for message in records.sent}
    for message_id, order in sorted(records.reminders.items()):
        if message_id not in sent:
            yield Finding(FindingKind.LOST, f"no {TRIP_REMINDER} of order {order} was sent: message {message_id}")
    effects = {(effect.group, effect.topic, effect.message_id) for effect in records.effects}
    for mark, message in expected.items():
        subject = f"message {message.id} ({message.topic}, order {message.order_id})"
        if records.fate(mark) is None:
            yield Finding(FindingKind.LOST, f"{subject} never came to {mark[0]}: it has no mark in the inbox")
        elif mark in records.marks and mark not in effects:
            yield Finding(FindingKind.LOST, f"{subject} has a mark of {mark[0]} in the inbox, but no effect")
    for message_id, status in records.withdrawals.items():
        if status is None:
            yield Finding(FindingKind.LOST, f"the cancel of message {message_id} has no result in the archive")


def _phantoms(records: Records, expected: Mapping[Mark, SentMessage]) -> Iterator[Finding]:
    for topic, order in sorted({(message.topic, message.order_id) for message in records.sent}):
        if order not in records.payments:
            yield Finding(FindingKind.PHANTOM, f"a {topic} was sent for order {order}, which has no payment")
    for message in records.sent:
        if (
            message.topic == TRIP_REMINDER
            and message.order_id in records.payments
            and message.id not in records.reminders
        ):
            yield Finding(FindingKind.PHANTOM, f"message {message.id} ({message.topic}) was sent, and never scheduled")
    for group, topic, message_id in sorted(records.marks - expected.keys()):
        yield Finding(FindingKind.PHANTOM, f"{group} has a mark of message {message_id} ({topic}) that was not sent")
    sent = {(message.topic, message.id, message.order_id) for message in records.sent}
    for group, topic, message_id, order in sorted({_of_effect(effect) for effect in records.effects}):
        if (topic, message_id, order) not in sent:
            yield Finding(
                FindingKind.PHANTOM, f"{group} has an effect of a {topic} for order {order} that was not sent"
            )


def _doubled(records: Records, messages: Iterable[SentMessage]) -> Iterator[Finding]:
    standing = Counter(
        (message.topic, message.order_id) for message in messages if message.id not in records.withdrawals
    )
    for (topic, order), count in standing.items():
        for _ in range(count - 1):
            yield Finding(FindingKind.DOUBLED, f"one more {topic} was sent for order {order}")
    effects = Counter(_of_effect(effect) for effect in records.effects)
    for (group, topic, _, order), count in effects.items():
        for _ in range(count - 1):
            yield Finding(FindingKind.DOUBLED, f"{group} has one more effect of {topic} for order {order}")


def _early(records: Records, messages: Iterable[SentMessage]) -> Iterator[Finding]:
    due_us = {
        (message.topic, message.id): message.deliver_at_ms * 1_000
        for message in messages
        if message.deliver_at_ms is not None
    }
    for effect in records.effects:
        before_us = due_us.get((effect.topic, effect.message_id), 0) - effect.at_us
        if before_us > 0:
            yield Finding(FindingKind.EARLY, f"{effect.topic} of order {effect.order_id} was {before_us:,} us early")


def _revived(records: Records) -> Iterator[Finding]:
    for group, topic, message_id in sorted(records.marks):
        if records.withdrawals.get(message_id) is CancelStatus.CANCELED:
            yield Finding(FindingKind.REVIVED, f"message {message_id} ({topic}) was canceled, and came to {group}")


def _of_effect(effect: ObservedEffect) -> tuple[str, str, str, int]:
    return effect.group, effect.topic, effect.message_id, effect.order_id
