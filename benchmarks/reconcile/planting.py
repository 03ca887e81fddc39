"""The records of flawed bookings, as rows of each source, and the expected verdicts.

Which records show which fault is said in benchmarks.reconcile.faults.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from outbox.store.row import CANCEL_TOPIC
from outbox.store.schema import RowKind
from outbox_core.journal import journal
from outbox_core.journal.block import FrameKind
from tests.spark_reconcile.message_log import LoggedMessage

SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60 * SECOND_MS
TRIPS: Final = ("trip.booked.ewr", "trip.booked.jfk", "trip.booked.lga")
REMINDER: Final = "trip.reminder"
COVERED: Final = (*TRIPS, REMINDER)
"""Topics with a rule of the same name."""
NEWS, OLD_NEWS, WEATHER = "newsletter", "newsletter.old", "weather"
PAUSED, JOINED, FILTERED = "newsletter.paused", "newsletter.joined", "newsletter.filtered"
TICKETS, MAIL = "tickets", "mail"
GROUPS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(TRIPS, (TICKETS, MAIL)), REMINDER: (MAIL,), PAUSED: (MAIL,), JOINED: (MAIL,), FILTERED: (MAIL,)
}  # fmt: skip
STORED_AFTER_MS, HANDED_AFTER_MS, HANDLED_AFTER_MS, ACKED_AFTER_MS = 12, 20, 30, 40
DUE_AFTER_MS: Final = 10 * MINUTE_MS


class Message(NamedTuple):
    """A message, or the business row that asks for one."""

    id: str
    topic: str
    key: str | None
    created_ms: int
    body: str
    due_ms: int | None = None

    @property
    def kind(self) -> str:
        """What its row in the outbox asks for."""
        return RowKind.CANCEL.value if self.topic == CANCEL_TOPIC else RowKind.PUBLISH.value

    @property
    def sha256(self) -> str:
        """Of its body, as the outbox writes it."""
        return hashlib.sha256(self.body.encode()).hexdigest()


class Expected(NamedTuple):
    """A verdict that must be given: on what, of which group or business rule, by which rule."""

    scope: str
    what: str
    of: str
    rule: str
    created_ms: int
    """By the hour of this time the verdict is found."""


@dataclass(slots=True)
class Planted:
    """The records of the flawed bookings, as rows of each source, and the verdicts to come.

    `now_ms`: when the reconciliation looks at them.
    """

    now_ms: int
    business: list[Message] = field(default_factory=list)
    outbox: list[tuple[Message, str]] = field(default_factory=list)
    archive: list[tuple[Message, int, str]] = field(default_factory=list)
    stored: list[LoggedMessage] = field(default_factory=list)
    actions: list[journal.Action] = field(default_factory=list)
    inbox: list[tuple[str, str, int]] = field(default_factory=list)
    second_inbox: list[tuple[str, str, int]] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """How often which kind was planted."""
    places: dict[str, int] = field(default_factory=dict)
    """The next sequence of each topic."""

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def message(self, one: Message, rule: str, echo: str = "") -> None:
        """The message gets this verdict, and its business row that echo of it."""
        self.expected.append(Expected("message", one.id, "", rule, one.created_ms))
        if echo:
            self.row(one, echo)

    def row(self, one: Message, rule: str) -> None:
        """The business rows under this key get this verdict."""
        self.expected.append(Expected("business", one.key or "", one.topic, rule, one.created_ms))

    def delivery(self, one: Message, group: str, rule: str) -> None:
        """The message gets this verdict in a group."""
        self.expected.append(Expected("delivery", one.id, group, rule, one.created_ms))

    # -- records -------------------------------------------------------------------------------------------------------

    def asked(self, one: Message) -> None:
        """A business row."""
        self.business.append(one)

    def sent(self, one: Message, *, sent_ms: int | None = None, outcome: str = "stored") -> None:
        """A row of the archive."""
        self.archive.append((one, sent_ms or one.created_ms + 15, outcome))

    def store(self, one: Message, *, stored_ms: int | None = None) -> int:
        """A record of the broker; its sequence."""
        place = self.place(one.topic)
        at_ms = one.created_ms + STORED_AFTER_MS if stored_ms is None else stored_ms
        self.stored.append(record(one, place, stored_ms=at_ms))
        return place

    def schedule(self, one: Message) -> None:
        """The broker's note of a message that is due later."""
        arrived = record(one, None, stored_ms=one.created_ms + STORED_AFTER_MS)
        self.stored.append(rewritten(arrived, kind=FrameKind.SCHEDULED))

    def fire(self, one: Message) -> int:
        """It fell due; its sequence."""
        place, at_ms = self.place(one.topic), one.due_ms or 0
        self.stored.append(rewritten(record(one, place, stored_ms=at_ms), kind=FrameKind.DISPATCHED))
        self.actions.append(journal.Fired(topic=one.topic, at_ms=at_ms, entries=[(place, one.id)]))
        return place

    def place(self, topic: str) -> int:
        """The next sequence of a topic."""
        self.places[topic] = self.places.get(topic, -1) + 1
        return self.places[topic]

    def hand(self, one: Message, place: int, group: str, *, at_ms: int | None = None, held_ms: int = 30_000) -> None:
        """A hand-out."""
        at = one.created_ms + HANDED_AFTER_MS if at_ms is None else at_ms
        self.actions.append(
            journal.Handed(
                topic=one.topic, group=group, at_ms=at, visible_at_ms=at + held_ms,
                runs=[journal.HandedRun(place, 1, 1, 1)],
            )
        )  # fmt: skip

    def ack(self, one: Message, place: int, group: str, *, at_ms: int | None = None) -> None:
        """An acknowledgement."""
        at = one.created_ms + ACKED_AFTER_MS if at_ms is None else at_ms
        self.actions.append(journal.Settled(topic=one.topic, group=group, at_ms=at, runs=[(place, 1)]))

    def handle(self, one: Message, *, at_ms: int | None = None) -> None:
        """A row of the inbox."""
        self.inbox.append((one.id, one.topic, one.created_ms + HANDLED_AFTER_MS if at_ms is None else at_ms))

    def done(self, one: Message, place: int, *, but: str = "", since_ms: int | None = None) -> None:
        """Handed out, handled and acknowledged in every group of its topic `but` one."""
        since = one.created_ms if since_ms is None else since_ms
        for group in GROUPS.get(one.topic, ()):
            if group != but:
                self.hand(one, place, group, at_ms=since + HANDED_AFTER_MS)
                self.ack(one, place, group, at_ms=since + ACKED_AFTER_MS)
                if group == TICKETS:
                    self.handle(one, at_ms=since + HANDLED_AFTER_MS)

    def whole(self, one: Message) -> None:
        """Sent, stored and done: nothing is amiss with the message."""
        self.sent(one)
        self.done(one, self.store(one))


def record(one: Message, place: int | None, *, stored_ms: int) -> LoggedMessage:
    """A message as the broker writes it."""
    return LoggedMessage(
        sequence=place, id=one.id, topic=one.topic, key=one.key, headers={}, body=one.body.encode(),
        created_at_ms=one.created_ms, stored_at_ms=stored_ms, deliver_at_ms=one.due_ms,
    )  # fmt: skip


def renamed(one: Message, name: str, **changes: Any) -> Message:
    """Another message like this one, under an id of its own."""
    created_ms = changes.get("created_ms", one.created_ms)
    digits = hashlib.sha256(f"{one.id} {name}".encode()).hexdigest()
    return one._replace(id=f"{created_ms:012x}7{digits[:3]}8{digits[3:18]}", **changes)


def rewritten(one: LoggedMessage, **changes: Any) -> LoggedMessage:
    """The record with something in it changed."""
    return msgspec.structs.replace(one, **changes)


def cancel(one: Message) -> Message:
    """The row that asks for a message's cancel, a minute later."""
    at_ms = one.created_ms + MINUTE_MS
    return renamed(one, "cancel", topic=CANCEL_TOPIC, key=None, body=one.id, due_ms=None, created_ms=at_ms)


def made_just_now(p: Planted, one: Message) -> Message:
    """The same booking, made a moment ago."""
    return renamed(one, "fresh", created_ms=p.now_ms - SECOND_MS)


def reminder(p: Planted, one: Message, *, due_ms: int | None = None, outcome: str = "stored") -> Message:
    """A trip of which its traveller is to be reminded, and the message for it, sent."""
    due = renamed(one, "remind", topic=REMINDER, due_ms=one.created_ms + DUE_AFTER_MS if due_ms is None else due_ms)
    p.asked(due)
    p.sent(due, outcome=outcome)
    return due


Kind = Callable[[Planted, Message], None]
