"""Journal records of deleted topics and consumer groups."""

from __future__ import annotations

import msgspec


class DeletedGroup(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="deleted_group"):
    """A consumer group was deleted, and retains no messages any more. A later one of the same name is a new group."""

    topic: str
    group: str
    at_ms: int


class DeletedTopic(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="deleted_topic"):
    """A topic was deleted with its `groups`: messages below the sequence `end` are never delivered again.

    Nor are its scheduled messages that the schedule had counted by then (below `scheduled_end`). `messages_end` and
    `actions_end`: the offsets of the logs' ends. A later topic of the same name continues at the sequence `end`.
    """

    topic: str
    at_ms: int
    end: int
    scheduled_end: int
    messages_end: int
    actions_end: int
    groups: list[str]
