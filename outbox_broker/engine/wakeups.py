"""Tracks who waits for messages of which group, and wakes them: also because their group was deleted. Does not select
messages.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.group.consumer_group import Group
from outbox_core.common.errors import GroupDeleted

DELETED_MAX: Final = 10_000
"""How many deletions of groups are remembered, for pulls that were waiting."""


class Wakeups:
    """Callbacks of waiters, by topic and group. They are called with or without the lock, and must not block."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._lock = context.lock
        self._state = context.state
        self.changed = threading.Condition(context.lock)
        """Notified when the timer may have to wake earlier than planned."""
        self.waiters: defaultdict[tuple[str, str], set[Callable[[], None]]] = defaultdict(set)
        self.pulls_waiting: Counter[tuple[str, str]] = Counter()
        """Waiting pulls that block a thread, by group."""
        self._short: set[tuple[str, str]] = set()
        self._waiting_groups: defaultdict[str, set[str]] = defaultdict(set)

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Register `wake` to be called, from any thread, whenever a group may have ready messages; returns the function
        that unregisters it.
        """
        group_key = (topic, group)
        with self.changed:
            self.waiters[group_key].add(wake)
            self._waiting_groups[topic].add(group)
            self.changed.notify_all()

        def unsubscribe() -> None:
            with self._lock:
                self.waiters[group_key].discard(wake)
                if not self.waiters[group_key]:
                    del self.waiters[group_key]
                    self._waiting_groups[topic].discard(group)
                if not self._waiting_groups[topic]:
                    del self._waiting_groups[topic]

        return unsubscribe

    def wake(self, topic: str, group: str) -> None:
        """Wake the timer and a group's waiters: messages may have become ready."""
        with self.changed:
            self.changed.notify_all()  # its visible times may differ from what the timer expects
        self.wake_waiters(topic, group)

    def wake_waiters(self, topic: str, group: str) -> None:
        """Wake the waiters of a group."""
        with self._lock:
            wakes = list(self.waiters.get((topic, group), ()))
        for wake in wakes:
            wake()

    def wake_topic(self, topic: str) -> None:
        """Wake the waiters of all groups of a topic."""
        with self._lock:
            groups = list(self._waiting_groups.get(topic, ()))
        for name in groups:
            self.wake(topic, name)

    def wake_next(self, topic: str, group: Group) -> None:
        """After a settlement: wake the group, as a key's next message may be ready, and groups short of capacity."""
        if group.order is not None:
            self.wake(topic, group.name)
        self.wake_short()

    def wake_short(self) -> None:
        """Wake groups that were short of in-flight capacity."""
        short, self._short = self._short, set()
        for group_key in short:
            self.wake(*group_key)

    def wake_wanting(self, topics: Iterable[str]) -> None:
        """After a publish: wake the groups that match something of it, by the index of their filters."""
        with self._lock:
            group_keys = [
                (topic, name) for topic in topics if topic in self._waiting_groups for name in self._wanting(topic)
            ]  # fmt: skip
        for group_key in group_keys:
            self.wake_waiters(*group_key)

    def _wanting(self, topic: str) -> list[str]:
        """Returns the waiting groups that match something of what is new."""
        groups = list(self._waiting_groups[topic])
        known_topic = self._state.topics.get(topic)
        if known_topic is None or known_topic.matcher is None:
            return groups
        return known_topic.matcher.to_wake(
            groups, durable_end=self._context.messages.committed, end=known_topic.index.end
        )

    def wake_all(self) -> None:
        """Wake everybody, including the timer: the engine is closed."""
        with self.changed:
            self.changed.notify_all()
            wakes = [wake for group in self.waiters.values() for wake in group]
        for wake in wakes:
            wake()

    def note_short(self, topic: str, group: str) -> None:
        """Record that a group lacked in-flight capacity: wake_short() wakes it. Under the lock."""
        self._short.add((topic, group))


class RecentGroupDeletions:
    """Deletions of groups, numbered from 1 in order since the start: a pull that waited for a deleted group ends, and
    does not create it again.
    """

    def __init__(self) -> None:
        self.deletions = 0
        """The number of deletions so far: a pull that may wait captures it at its start."""
        self._deleted_in: dict[tuple[str, str], int] = {}

    def note(self, topic: str, groups: Sequence[str]) -> None:
        """Record the deletion of groups of a topic. Under the lock."""
        self.deletions += 1
        for group in groups:
            self._deleted_in.pop((topic, group), None)
            self._deleted_in[topic, group] = self.deletions
        while len(self._deleted_in) > DELETED_MAX:
            del self._deleted_in[next(iter(self._deleted_in))]

    def refuse_if_deleted(self, topic: str, group: str, *, since: int | None) -> None:
        """Raise GroupDeleted if a group was deleted after deletion number `since`; None: the pull has not waited."""
        if since is not None and self._deleted_in.get((topic, group), 0) > since:
            raise group_deleted(topic, group)


def group_deleted(topic: str, group: str) -> GroupDeleted:
    """Returns the error that ends a pull whose group was deleted meanwhile."""
    return GroupDeleted(f"the consumer group {group} of {topic} was deleted while the pull waited")
