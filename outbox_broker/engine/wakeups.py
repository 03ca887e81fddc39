"""Who waits for messages of which group, and who is woken when. Not what they are handed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from outbox_broker.engine.context import EngineContext
from outbox_broker.group.consumer_group import Group


class Wakeups:
    """Callbacks of those who wait, by topic and group. They are called with or without the lock, and must not block."""

    def __init__(self, context: EngineContext) -> None:
        self._lock = context.lock
        self._state = context.state
        self._messages = context.messages
        self.changed = threading.Condition(context.lock)
        """Notified where the timer may have to wake earlier than it thinks."""
        self.waiters: defaultdict[tuple[str, str], set[Callable[[], None]]] = defaultdict(set)
        self.pulls_waiting: Counter[tuple[str, str]] = Counter()
        """Of each group those with a thread each."""
        self._short: set[tuple[str, str]] = set()
        self._waiting_groups: defaultdict[str, set[str]] = defaultdict(set)

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called, from any thread, whenever something may have become ready for a group; returns the
        undo.
        """
        place = (topic, group)
        with self.changed:
            self.waiters[place].add(wake)
            self._waiting_groups[topic].add(group)
            self.changed.notify_all()

        def unsubscribe() -> None:
            with self._lock:
                self.waiters[place].discard(wake)
                if not self.waiters[place]:
                    del self.waiters[place]
                    self._waiting_groups[topic].discard(group)
                if not self._waiting_groups[topic]:
                    del self._waiting_groups[topic]

        return unsubscribe

    def wake(self, topic: str, group: str) -> None:
        """Something may have become ready for a group: wake the timer, and who waits for it."""
        with self.changed:
            self.changed.notify_all()  # its visible times may be others than the timer thinks
        self.wake_waiters(topic, group)

    def wake_waiters(self, topic: str, group: str) -> None:
        """Wake those who wait for a group."""
        with self._lock:
            wakes = list(self.waiters.get((topic, group), ()))
        for wake in wakes:
            wake()

    def wake_topic(self, topic: str) -> None:
        """Wake those who wait for any group of a topic."""
        with self._lock:
            groups = list(self._waiting_groups.get(topic, ()))
        for name in groups:
            self.wake(topic, name)

    def wake_next(self, topic: str, group: Group) -> None:
        """After a settlement: the next of its keys may go, and there is room for who got less than there is."""
        if group.order is not None:
            self.wake(topic, group.name)
        self.wake_short()

    def wake_short(self) -> None:
        """There is room in hand: wake who got less than there is."""
        short, self._short = self._short, set()
        for place in short:
            self.wake(*place)

    def wake_wanting(self, topics: Iterable[str]) -> None:
        """After a publish: wake the groups that want something of what is new, by the index of their filters."""
        with self._lock:
            places = [
                (topic, name) for topic in topics if topic in self._waiting_groups for name in self._wanting(topic)
            ]  # fmt: skip
        for place in places:
            self.wake_waiters(*place)

    def _wanting(self, topic: str) -> list[str]:
        """The groups that wait, and want something of what is new."""
        groups = list(self._waiting_groups[topic])
        known = self._state.topics.get(topic)
        if known is None or known.wanted is None:
            return groups
        return known.wanted.to_wake(groups, durable_end=self._messages.durable_end, end=known.index.end)

    def wake_all(self) -> None:
        """Wake everybody, the timer too: the engine is closed."""
        with self.changed:
            self.changed.notify_all()
            wakes = [wake for group in self.waiters.values() for wake in group]
        for wake in wakes:
            wake()

    def note_short(self, topic: str, group: str) -> None:
        """A group got less than there is, for want of room in hand: wake_short() wakes it. Under the lock."""
        self._short.add((topic, group))
