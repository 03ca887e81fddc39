"""What the broker writes down of topics and consumer groups that are deleted: records of the journal."""

from __future__ import annotations

import msgspec


class DeletedGroup(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="deleted_group"):
    """A consumer group was deleted: it owes nothing any more. Another of the same name is another group."""

    topic: str
    group: str
    at_ms: int


class DeletedTopic(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="deleted_topic"):
    """A topic was deleted, and its `groups` with it: its messages below the sequence `end` are delivered to nobody.

    Nor are its scheduled messages that the schedule had counted by then (below `scheduled_end`). `messages_end` and
    `actions_end`: where the logs ended. Another topic of the same name goes on at `end`.
    """

    topic: str
    at_ms: int
    end: int
    scheduled_end: int
    messages_end: int
    actions_end: int
    groups: list[str]
