"""Determines which groups match what is published on a topic, by an index of their filters. In memory.

A group whose filter rejected everything since the group was at the end advances without reading: the index has seen it
all. That holds only if the index saw every message: messages placed without it (dispatched, or from before a restart)
are read. So a way into the message log that forgets the index makes the broker slower, not wrong.
Per group only the end of the last match is kept: a list of matches would make the pulls of a lagging group cheaper, at
the price of memory or disk for every group and message, and of one message log for all groups.
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
        self._rewoken: set[str] = set()

    def __len__(self) -> int:
        """Returns how many groups have a filter."""
        return len(self._texts)

    def declare(self, group: str, text: str | None, node: Node | None = None, *, end: int) -> None:
        """Set a group's filter, where the topic ends at `end`; None: it matches everything."""
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
        """Match messages that got the topic's sequences from `first` on and are in the message log before `log_end`."""
        if first != self._seen_end:
            self._seen_from = first
        self._seen_end = first + len(headers)
        self._log_end = log_end
        for sequence, groups in enumerate(self._index.match_batch(headers), first + 1):
            for group in groups:
                self._last_match_end[group] = sequence
                self._to_wake[group] = log_end
                self._rewoken.discard(group)

    def position_after_filtered(self, group: str, position: int) -> int:
        """Returns the position to which a group can advance without reading."""
        seen_from = max(self._seen_from, self._last_match_end.get(group, self._seen_end))
        return self._seen_end if group in self._texts and seen_from <= position < self._seen_end else position

    def to_wake(self, groups: Sequence[str], *, durable_end: int, end: int) -> list[str]:
        """Returns which of the waiting groups have something new to read, where the topic ends at `end`. A group is
        reported until its match is durable, so that of two concurrent publishers neither consumes the other's
        notification; and once more when everything then in the log is durable: a run becomes visible only with its last
        message, which may match no group.
        """
        if self._seen_end != end:
            return list(groups)
        groups_to_wake = [group for group in groups if group not in self._texts or group in self._to_wake]
        for group in groups_to_wake:
            if self._to_wake.get(group, durable_end + 1) > durable_end:
                continue
            if group in self._rewoken or self._log_end <= durable_end:
                self._forget(group)
            else:
                self._to_wake[group] = self._log_end
                self._rewoken.add(group)
        return groups_to_wake

    def _forget(self, group: str) -> None:
        self._to_wake.pop(group, None)
        self._rewoken.discard(group)
