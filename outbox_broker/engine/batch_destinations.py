"""Splits a published batch: where each of its messages goes, and the records for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from outbox_broker.schedule.delay_store import TimedMessage
from outbox_broker.state.scheduled_message_encoding import encode_scheduled
from outbox_core.journal import journal
from outbox_core.messages.message import Message, PublishResult, PublishStatus


@dataclass(slots=True, kw_only=True)
class BatchDestinations:
    """The messages of a batch by destination: `plain` for the message log, `later` (with their indexes in the batch)
    for the schedule.
    """

    now_ms: int
    is_known: Callable[[str, str], bool]  # to the schedule
    is_recent: Callable[[str, str], bool]
    results: list[PublishResult] = field(default_factory=list)
    plain: list[Message] = field(default_factory=list)
    later: list[tuple[int, Message]] = field(default_factory=list)
    topics_new: set[str] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def sort(self, message: Message, *, problem: PublishResult | None) -> None:
        """Add the next message; the status of one that goes to the schedule is decided there."""
        status, place = PublishStatus.STORED, (message.topic, message.id)
        if problem is not None:
            self.results.append(problem)
            return
        if place in self.seen or self.is_recent(*place):
            status = PublishStatus.DUPLICATE
        elif (message.deliver_at_ms or 0) > self.now_ms or self.is_known(*place):
            self.later.append((len(self.results), message))
        else:
            self.plain.append(message)
        self.seen.add(place)
        self.results.append(PublishResult(message.id, status))


def arranged(batch: Sequence[Message]) -> tuple[Sequence[Message], dict[str, int]]:
    """Returns a batch grouped by topic, in its order; and its topics in order, with the number of messages of each."""
    counts: dict[str, int] = {}
    for one in batch:
        counts[one.topic] = counts.get(one.topic, 0) + 1
    if 1 < len(counts) < len(batch):
        return sorted(batch, key=attrgetter("topic")), dict(sorted(counts.items()))
    return batch, counts


def record_of(
    message: Message, *, now_ms: int, sequence: int | None, copy: journal.Copy = journal.PUBLISHED
) -> journal.MessageRecord:
    """Returns the message log's record of a message."""
    return journal.MessageRecord(
        sequence=sequence, id=message.id, topic=message.topic, key=message.key, headers=dict(message.headers),
        body=message.body, created_at_ms=message.created_at_ms or now_ms,
        stored_at_ms=now_ms, deliver_at_ms=message.deliver_at_ms, copy=copy,
    )  # fmt: skip


def dead_on_arrival(message: Message, *, now_ms: int) -> bytes:
    """Encode the record of a scheduled message that was canceled before it arrived."""
    return journal.encode_record(record_of(message, now_ms=now_ms, sequence=None, copy=journal.DEAD_ON_ARRIVAL))


def timed_of(message: Message, *, now_ms: int) -> TimedMessage:
    """Returns a message in the schedule's form; without a due time it is due now."""
    due_ms = now_ms if message.deliver_at_ms is None else message.deliver_at_ms
    return TimedMessage(due_ms, message.id, message.topic, encode_scheduled(message, now_ms=now_ms))
