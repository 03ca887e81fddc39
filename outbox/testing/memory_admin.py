"""The operator's half of the in-memory broker: groups, figures, dead letters. No hand-outs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from outbox.testing.memory_group import MemoryGroup, Slot, SlotState
from outbox.testing.memory_topics import MemoryTopic
from outbox_core.common.errors import InvalidMessage, NotSupported
from outbox_core.messages.message import DeadLetter, GroupConfig, check_group, check_topic
from outbox_core.messages.topic_stats import topic_figures

if TYPE_CHECKING:
    from outbox.testing.memory_store import MemoryStore


REDRIVE_PER_SECOND: Final = 1_000


class MemoryAdmin:
    """BrokerAdmin in memory. Unknown topics and groups are refused (BrokerRefused)."""

    def __init__(self, open_store: Callable[[], AbstractContextManager[MemoryStore]]) -> None:
        self._open = open_store

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make the group, or change its settings."""
        check_topic(topic)
        check_group(group)
        if config.filter is not None:
            raise NotSupported("the in-memory broker does not filter: declare the group without filter")
        with self._open() as store:
            store.topics.fire_due(now_ms=store.clock.now_ms())
            store.topics.group(topic, group, config)
            store.changed.notify_all()

    def topics(self) -> list[str]:
        """All topics, sorted."""
        with self._open() as store:
            return sorted(store.topics.topics)

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """stored, scheduled, backlog, in_flight, dead, oldest_unacked_age_ms; of a group also position, redriving."""
        with self._open() as store:
            now_ms = store.clock.now_ms()
            store.topics.fire_due(now_ms=now_ms)
            place = store.topics.known_topic(topic)
            stored, scheduled = len(place.messages), store.topics.scheduled([topic])
            if group is None:
                groups = [_group_figures(place, one, now_ms=now_ms) for one in place.groups.values()]
                return topic_figures(stored=stored, scheduled=scheduled, groups=groups)
            known = store.topics.known_group(topic, group)
            return {"stored": stored, "scheduled": scheduled, **_group_figures(place, known, now_ms=now_ms)}

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move the group to a time or an offset, one of them."""
        if (to_ms is None) == (to_offset is None) or (to_offset is not None and to_offset < 0):
            raise InvalidMessage("seek to a time (to_ms) or to an offset (to_offset >= 0), one of them")
        with self._open() as store:
            store.topics.fire_due(now_ms=store.clock.now_ms())
            known, place = store.topics.known_group(topic, group), store.topics.known_topic(topic)
            wanted = place.position_at(to_ms) if to_ms is not None else to_offset or 0
            if wanted > len(place.messages):
                raise InvalidMessage(f"offset {wanted:,} is beyond the end of {topic}, {len(place.messages):,}")
            known.seek(wanted)
            store.changed.notify_all()

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Stop or resume hand-outs."""
        with self._open() as store:
            store.topics.known_group(topic, group).paused = paused
            store.changed.notify_all()

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters, and the cursor of the next."""
        if after is not None and not after.isdigit():
            raise InvalidMessage("after must be the cursor of an earlier page")
        with self._open() as store:
            known, place = store.topics.known_group(topic, group), store.topics.known_topic(topic)
            known.bury_expired(store.clock.now_ms())
            found = [slot for slot in known.dead() if after is None or slot.sequence > int(after)]
            letters = [_dead_letter(place, group, slot) for slot in found[:limit]]
            return letters, str(found[limit].sequence - 1) if len(found) > limit else None

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Give dead letters a new life, so many ready a second; returns how many."""
        with self._open() as store:
            now_ms = store.clock.now_ms()
            known, place = store.topics.known_group(topic, group), store.topics.known_topic(topic)
            known.bury_expired(now_ms)
            wanted = None if ids is None else set(ids)
            found = [
                slot
                for slot in known.dead()
                if wanted is None or place.messages[slot.sequence].message.id in wanted
            ]  # fmt: skip
            for number, slot in enumerate(found):
                known.redrive(slot, now_ms=now_ms + number // (per_second or REDRIVE_PER_SECOND) * 1_000)
            store.changed.notify_all()
            return len(found)


def _group_figures(topic: MemoryTopic, group: MemoryGroup, *, now_ms: int) -> dict[str, int]:
    group.bury_expired(now_ms)
    stored, oldest = len(topic.messages), group.oldest_unsettled()
    return {
        "backlog": stored - group.position + group.count(SlotState.WAITING),
        "in_flight": group.count(SlotState.IN_FLIGHT),
        "dead": group.count(SlotState.DEAD),
        "redriving": group.redriving(now_ms=now_ms),
        "position": group.position,
        "oldest_unacked_age_ms": max(0, now_ms - topic.messages[oldest].ready_at_ms) if oldest < stored else 0,
    }


def _dead_letter(topic: MemoryTopic, group: str, slot: Slot) -> DeadLetter:
    message = topic.messages[slot.sequence].message
    return DeadLetter(
        id=message.id, topic=topic.name, group=group, attempts=slot.attempts, reason=slot.reason,
        dead_at_ms=slot.dead_at_ms, history=slot.history, key=message.key, headers=dict(message.headers),
        body=message.body,
    )  # fmt: skip
