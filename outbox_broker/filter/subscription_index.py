"""The filter index of one topic: finds the subscriptions that match a message's headers, at a nearly constant cost.

Every filter is split by the index header: into the remainder for each value that it names, and for all others. A
message's value selects, by one lookup, the tree of filters that can match it. Filters with a remainder for "all others"
(those that do not test the header, or exclude some values) are in one more tree that every message is matched against.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

from outbox_broker.filter.compiler import Headers
from outbox_broker.filter.expression_tree import FALSE, Node
from outbox_broker.filter.match_tree import Answer, Key, MatchTree, plan_of
from outbox_broker.filter.partial_evaluation import Split, split
from outbox_core.common.errors import FilterError

INDEX_HEADER: Final = "type"
SUBSCRIPTIONS_MAX: Final = 100_000


@dataclass(slots=True, eq=False)
class _Entry(Generic[Key]):
    """A filter and the keys that use it; filters are equal if their trees are."""

    split: Split
    keys: dict[Key, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Bucket(Generic[Key]):
    """The remainders of filters for one value; `excluded` are those that match other values only."""

    left: dict[Node, dict[_Entry[Key], None]] = field(default_factory=dict)
    excluded: dict[_Entry[Key], None] = field(default_factory=dict)

    def plan(self) -> MatchTree[Key]:
        return plan_of({node: [key for one in entries for key in one.keys] for node, entries in self.left.items()})

    def discard(self, entry: _Entry[Key], node: Node) -> None:
        self.excluded.pop(entry, None)
        entries = self.left.get(node, {})
        entries.pop(entry, None)
        if not entries:
            self.left.pop(node, None)


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """Sizes of an index. `unindexed`: distinct filters that every message is matched against, whatever its value;
    `answers`: values for which match trees and answers are kept.
    """

    subscriptions: int
    filters: int
    values: int
    unindexed: int
    answers: int


class FilterIndex(Generic[Key]):
    """Subscriptions by key, each with a filter. Not thread-safe: to be used under its owner's lock.

    Memory: a tree for each distinct filter, its remainder for each value that it names, and the match trees: about 2
    KiB per subscription that names one type and one or two other conditions. No message data is kept. After a change,
    trees are rebuilt by the next match.
    """

    def __init__(self, header: str = INDEX_HEADER, *, subscriptions_max: int = SUBSCRIPTIONS_MAX) -> None:
        self._header = header
        self._subscriptions_max = subscriptions_max
        self._nodes: dict[Key, Node] = {}
        self._entries: dict[Node, _Entry[Key]] = {}
        self._buckets: dict[str | None, _Bucket[Key]] = {}
        self._others: _Bucket[Key] = _Bucket()
        self._stale: set[str | None] = set()
        self._others_stale = False
        self._plans: dict[str | None, tuple[MatchTree[Key], frozenset[Key]]] = {}
        self._others_plan: MatchTree[Key] = MatchTree()
        self._answers: dict[str | None, Answer[Key]] = {}
        self._others_answer: Answer[Key] = ()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def add(self, key: Key, node: Node) -> None:
        """Add a subscription, replacing the one under this key. Raises FilterError if there are too many."""
        self.remove(key)
        if len(self._nodes) >= self._subscriptions_max:
            raise FilterError(
                f"there are {len(self._nodes):,} filters already, and no more are allowed (subscriptions_max)"
            )
        self._nodes[key] = node
        entry = self._entries.get(node)
        if entry is None:
            entry = self._entries[node] = _Entry(split(node, self._header))
            self._file(entry)
        entry.keys[key] = None
        self._mark(entry)

    def remove(self, key: Key) -> None:
        """Remove a subscription; a missing key is no error."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        entry = self._entries[node]
        del entry.keys[key]
        self._mark(entry)
        if not entry.keys:
            del self._entries[node]
            self._unfile(entry)

    def match(self, headers: Headers) -> Sequence[Key]:
        """Returns the keys of all subscriptions whose filters are TRUE for these headers, each once, unordered."""
        return self.match_batch((headers,))[0]

    def match_batch(self, batch: Iterable[Headers]) -> list[Sequence[Key]]:
        """Like match() for each message of a batch, in the batch's order.

        For values with a constant answer the lookup suffices: their messages share one answer.
        """
        if self._stale or self._others_stale:
            self._refresh()
        name, answers, default = self._header, self._answers, self._others_answer
        found: list[Sequence[Key]] = []
        for headers in batch:
            answer = answers.get(headers.get(name), default)
            found.append(answer if isinstance(answer, tuple) else answer(headers))
        return found

    def figures(self) -> IndexFigures:
        """Returns the index's sizes."""
        return IndexFigures(
            subscriptions=len(self._nodes),
            filters=len(self._entries),
            values=len(self._buckets),
            unindexed=len(self._others.left),
            answers=len(self._plans.keys() | self._answers.keys()),
        )

    def _file(self, entry: _Entry[Key]) -> None:
        other = entry.split.other
        if other != FALSE:
            self._others.left.setdefault(other, {})[entry] = None
        for value, node in entry.split.by_value.items():
            bucket = self._buckets.setdefault(value, _Bucket())
            if node != FALSE:
                bucket.left.setdefault(node, {})[entry] = None
            if other != FALSE:
                bucket.excluded[entry] = None

    def _unfile(self, entry: _Entry[Key]) -> None:
        self._others.discard(entry, entry.split.other)
        for value, node in entry.split.by_value.items():
            bucket = self._buckets[value]
            bucket.discard(entry, node)
            if not bucket.left and not bucket.excluded:
                del self._buckets[value]

    def _mark(self, entry: _Entry[Key]) -> None:
        self._stale.update(entry.split.by_value)
        self._others_stale = self._others_stale or entry.split.other != FALSE

    def _refresh(self) -> None:
        if self._others_stale:
            self._others_plan = self._others.plan()
            self._others_answer = self._others_plan.answer()
        for value in self._stale:
            bucket = self._buckets.get(value)
            if bucket is None:
                self._plans.pop(value, None)
                self._answers.pop(value, None)
            else:
                self._plans[value] = (bucket.plan(), frozenset(_keys(bucket.excluded)))
        for value in self._plans if self._others_stale else self._stale & self._plans.keys():
            self._answers[value] = self._answer(value)
        self._stale.clear()
        self._others_stale = False

    def _answer(self, value: str | None) -> Answer[Key]:
        """Combine the tree of a value and that of all values, minus those who exclude this one, into one answer."""
        (plan, excluded), others = self._plans[value], self._others_plan
        if others.is_constant and not others.constant:
            return plan.answer()
        if plan.is_constant and others.is_constant:
            return plan.constant + tuple(key for key in others.constant if key not in excluded)

        def answer(headers: Headers) -> list[Key]:
            found: list[Key] = []
            others.collect(headers, found)
            if excluded:
                found = [key for key in found if key not in excluded]
            plan.collect(headers, found)
            return found

        return answer


def _keys(entries: Iterable[_Entry[Key]]) -> Iterator[Key]:
    for entry in entries:
        yield from entry.keys
