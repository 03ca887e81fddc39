"""Who wants what is published on a topic, by the index of its groups' filters. In memory; it wakes nobody itself.

A group whose filter has been false for all that came since it was at the end comes past it unread: the index has seen
it. That holds only where the index saw every message: what was placed without it (fired, or before a restart) is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox_broker.filter import FilterIndex, parse
from outbox_broker.filter.expression_tree import Node


class SubscriptionMatcher:
    """The filters of one topic's groups. Sequences are the topic's; used under the engine's lock."""

    def __init__(self, header: str) -> None:
        self._index: FilterIndex[str] = FilterIndex(header)
        self._texts: dict[str, str] = {}
        self._last_match_end: dict[str, int] = {}
        self._seen_from = 0
        self._seen_end = 0
        self._log_end = 0
        self._to_wake: dict[str, int] = {}
        self._again: set[str] = set()

    def __len__(self) -> int:
        """How many groups have a filter."""
        return len(self._texts)

    def declare(self, group: str, text: str | None, node: Node | None = None, *, end: int) -> None:
        """A group has this filter from now on, where the topic ends at `end`; None: it wants everything."""
        if text == self._texts.get(group):
            return
        self._index.remove(group)
        self._texts.pop(group, None)
        self._forget(group)
        if text is not None:
            self._index.add(group, parse(text) if node is None else node)
            self._texts[group] = text
            self._last_match_end[group] = end

    def published(self, first: int, headers: Sequence[Mapping[str, str]], *, log_end: int) -> None:
        """Messages take the topic's sequences from `first` on, and stand in the message log before `log_end`."""
        if first != self._seen_end:
            self._seen_from = first
        self._seen_end = first + len(headers)
        self._log_end = log_end
        for sequence, groups in enumerate(self._index.match_batch(headers), first + 1):
            for group in groups:
                self._last_match_end[group] = sequence
                self._to_wake[group] = log_end
                self._again.discard(group)

    def passed(self, group: str, position: int) -> int:
        """Where a group at a position goes on: behind what it has no need to read."""
        seen_from = max(self._seen_from, self._last_match_end.get(group, self._seen_end))
        return self._seen_end if group in self._texts and seen_from <= position < self._seen_end else position

    def to_wake(self, groups: Sequence[str], *, durable_end: int, end: int) -> list[str]:
        """Of groups that wait those that want something new, where the topic ends at `end`. Told of a group until what
        it wants is durable, so that of two publishers at once none takes the other's word; and once more when all is
        that stood in the log by then: a run is seen only once its last message is durable, which none may want.
        """
        if self._seen_end != end:
            return list(groups)
        found = [one for one in groups if one not in self._texts or one in self._to_wake]
        for group in found:
            if self._to_wake.get(group, durable_end + 1) > durable_end:
                continue
            if group in self._again or self._log_end <= durable_end:
                self._forget(group)
            else:
                self._to_wake[group] = self._log_end
                self._again.add(group)
        return found

    def _forget(self, group: str) -> None:
        self._to_wake.pop(group, None)
        self._again.discard(group)
