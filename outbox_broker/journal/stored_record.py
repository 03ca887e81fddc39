"""The bytes of a message in the broker's logs: those of its Record. Pure.

They are the same in the schedule, in its topic and over the wire: where a message stands, when it was stored and what
became of it is said by the frame that holds it, and its block.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox_core.journal.block import Framed, FrameKind, framed
from outbox_core.messages.message import Record, encode_packed


def stored_record(message: Record, *, now_ms: int) -> bytes:
    """Returns what is stored of a message; one that does not say when it was created has been now."""
    if message.created_at_ms:
        return encode_packed(message)
    return encode_packed(
        Record(
            id=message.id, topic=message.topic, key=message.key, headers=message.headers, body=message.body,
            created_at_ms=now_ms, deliver_at_ms=message.deliver_at_ms,
        )
    )  # fmt: skip


def frames_aside(messages: Iterable[tuple[int, Record]]) -> Framed:
    """Returns the frames of messages aside from their topic, which have created_at_ms; each with its sequence there."""
    frames = Framed(FrameKind.ASIDE)
    for sequence, message in messages:
        frames.extend(framed(FrameKind.ASIDE, range(sequence, sequence + 1), [encode_packed(message)]))
    return frames
