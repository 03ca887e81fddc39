"""Scheduled messages with equal and with mixed due times, in batches of all sizes, and the order in which they come.

The rule is one for every engine: by due time, then as they were published; within a topic, a shard or a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from outbox_core import Message

SIZES: Final = (5, 1, 3, 1, 300, 40, 1, 2, 290)
"""More due together than one dispatch takes, so that batches are cut within a millisecond."""
SPAN_MS: Final = 5


def scheduled(topic: str, *, base_ms: int) -> list[list[Message]]:
    """Returns batches: one half is due at one time, the other is mixed over SPAN_MS; ids are in no order of theirs."""
    batches: list[list[Message]] = []
    number = 0
    for size in SIZES:
        batch: list[Message] = []
        for _ in range(size):
            due_ms = base_ms + (2 if number % 2 else number * 7 % SPAN_MS)
            batch.append(Message(id=f"{999 - number:03}", topic=topic, body=b"x", key="k", deliver_at_ms=due_ms))
            number += 1
        batches.append(batch)
    return batches


def in_order(batches: Iterable[Sequence[Message]]) -> list[str]:
    """Returns the ids as they come: sorting keeps the order of publishes among equal due times."""
    return [
        one.id for one in sorted((one for batch in batches for one in batch), key=lambda one: one.deliver_at_ms or 0)
    ]
