"""The broker's log of messages, as the proof's tests and benchmarks write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from outbox_core.journal.block import Framed, FrameKind, SegmentKind, framed
from outbox_core.messages.message import Record, encode_packed
from tests.outbox_broker.action_log import append_blocks, write_segments
from tests.outbox_broker.message_log import StoredMessage


class LoggedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the broker's log, with what its frame and its block say of it."""

    sequence: int | None
    id: str
    topic: str
    key: str | None
    headers: dict[str, str]
    body: bytes
    created_at_ms: int
    stored_at_ms: int
    deliver_at_ms: int | None = None
    kind: FrameKind = FrameKind.MESSAGE

    @property
    def record(self) -> Record:
        """What its frame holds."""
        return Record(
            id=self.id, topic=self.topic, key=self.key, headers=self.headers, body=self.body,
            created_at_ms=self.created_at_ms, deliver_at_ms=self.deliver_at_ms,
        )  # fmt: skip


def logged(stored: StoredMessage) -> LoggedMessage:
    """What was read of a log that this module wrote, to be written again."""
    record, kind = stored.record, FrameKind(stored.kind)
    return LoggedMessage(
        sequence=stored.number if kind in {FrameKind.MESSAGE, FrameKind.DISPATCHED} else None, id=record.id,
        topic=record.topic, key=record.key, headers=dict(record.headers), body=record.body,
        created_at_ms=record.created_at_ms, stored_at_ms=stored.stored_at_ms or 0, deliver_at_ms=record.deliver_at_ms,
        kind=kind,
    )  # fmt: skip


def framed_messages(messages: Sequence[object]) -> Framed:
    """The frames of one block, as the broker numbers them. What is no LoggedMessage is framed as a published one."""
    frames, counts = Framed(_kind(messages[0])), Counter[FrameKind]()
    for message in messages:
        kind = _kind(message)
        sequence, record = (message.sequence, message.record) if isinstance(message, LoggedMessage) else (None, message)
        number = counts[kind] if sequence is None else sequence
        frames.extend(framed(kind, range(number, number + 1), [encode_packed(record)]))
        counts[kind] += 1
    return frames


def write_messages(
    folder: Path, messages: Sequence[object], messages_a_segment: int, *, created_at_ms: int, first_offset: int = 0,
    first_number: int = 1,
) -> list[Path]:  # fmt: skip
    """Write a log of messages, `messages` in a data folder or what `folder` is called, each in a block of its own."""
    return write_segments(
        folder, messages, messages_a_segment, kind=SegmentKind.MESSAGES, append=append_messages,
        created_at_ms=created_at_ms, first_offset=first_offset, first_number=first_number,
    )  # fmt: skip


def append_messages(path: Path, messages: Sequence[object], *, together: bool = False) -> None:
    """Append messages to a file that is whole, each in a block of its own, or all in one of the latest one's time."""
    groups = [messages] if together else [[message] for message in messages]
    append_blocks(
        path,
        [
            (framed_messages(some), max(getattr(message, "stored_at_ms", STORED_AT_MS) for message in some))
            for some in groups
        ],
    )


STORED_AT_MS = 6
"""Of what is no LoggedMessage."""


def _kind(message: object) -> FrameKind:
    return message.kind if isinstance(message, LoggedMessage) else FrameKind.MESSAGE
