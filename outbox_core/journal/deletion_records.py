"""Journal records of deleted topics and consumer groups, and of purged topics."""

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


class PurgedTopic(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="purged_topic"):
    """Groups of a topic, (name, new generation) each, were moved to the sequence `end`: as by a seek of each."""

    topic: str
    at_ms: int
    end: int
    groups: list[tuple[str, int]]
