"""A match tree finds, among many filters, those that a message's headers satisfy. Built once, immutable.

Filters that are always TRUE come first. Filters that require certain texts of a header are behind a hash lookup of that
header, with the rest of their conditions, and so on for a few levels. Filters that compare a header with a number are
ordered by the number (see range_index). All others are called one by one, equal ones once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from outbox_broker.filter.compiler import Headers, Predicate, compile_condition
from outbox_broker.filter.expression_tree import TRUE, And, Comparison, ComparisonOperator, In, Node, all_of
from outbox_broker.filter.range_index import RangeIndex, range_indexes_of

LEVELS_MAX: Final = 3
SWITCH_FILTERS_MIN: Final = 4
"""Fewer filters are faster to call than to look up by hash."""
SWITCH_VALUES_MAX: Final = 16
"""A filter with IN has one switch entry per value; one with a longer list is called."""

Key = TypeVar("Key", bound=Hashable)
Members: TypeAlias = Mapping[Node, Iterable[Key]]
Answer: TypeAlias = tuple[Key, ...] | Callable[[Headers], Sequence[Key]]


@dataclass(frozen=True, slots=True)
class MatchTree(Generic[Key]):
    """`constant`: keys that always match. `called`: predicates with their keys. `switches`: by a header's value."""

    constant: tuple[Key, ...] = ()
    called: tuple[tuple[Predicate, tuple[Key, ...]], ...] = ()
    switches: tuple[tuple[str, dict[str, MatchTree[Key]]], ...] = ()
    ranges: tuple[RangeIndex[Key], ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether every message gets the same answer."""
        return not (self.called or self.switches or self.ranges)

    def answer(self) -> Answer[Key]:
        """Returns what to evaluate per message: the keys if they are constant, else a function of its headers."""
        if self.is_constant:
            return self.constant
        if self.constant:
            return self._found
        match self.called, self.switches, self.ranges:  # the shapes of most values: no list is built
            case (((predicate, keys),), (), ()):
                return lambda headers: keys if predicate(headers) else ()
            case ((), ((name, plans),), ()):
                return _switched(name, plans)
            case ((), (), (index,)):
                return index.found
            case _:
                return self._found

    def _found(self, headers: Headers) -> list[Key]:
        found: list[Key] = []
        self.collect(headers, found)
        return found

    def collect(self, headers: Headers, found: list[Key]) -> None:
        """Append all keys that match."""
        found += self.constant
        for predicate, keys in self.called:
            if predicate(headers):
                found += keys
        for name, plans in self.switches:
            value = headers.get(name)
            plan = None if value is None else plans.get(value)
            if plan is not None:
                plan.collect(headers, found)
        for index in self.ranges:
            index.collect(headers, found)


def plan_of(members: Members[Key], *, levels: int = LEVELS_MAX) -> MatchTree[Key]:
    """Build the tree of these filters, each with its keys."""
    left: dict[Node, tuple[Key, ...]] = {node: tuple(keys) for node, keys in members.items()}
    constant = left.pop(TRUE, ())
    switches: list[tuple[str, dict[str, MatchTree[Key]]]] = []
    while levels and (name := _busiest(left)) is not None:
        behind: dict[str, dict[Node, list[Key]]] = {}
        for node in [node for node in left if name in dict(_guards(node))]:
            guard = dict(_guards(node))[name]
            keys, rest = left.pop(node), _without(node, guard)
            for value in _texts(guard):
                behind.setdefault(value, {}).setdefault(rest, []).extend(keys)
        switches.append((name, {value: plan_of(those, levels=levels - 1) for value, those in behind.items()}))
    ranges = range_indexes_of(left)
    for index in ranges:
        for node in index.nodes:
            del left[node]
    called = tuple((compile_condition(node), keys) for node, keys in left.items())
    return MatchTree(constant, called, tuple(switches), ranges)


def _switched(name: str, plans: Mapping[str, MatchTree[Key]]) -> Callable[[Headers], Sequence[Key]]:
    answers: dict[str | None, Answer[Key]] = {value: plan.answer() for value, plan in plans.items()}

    def answer(headers: Headers) -> Sequence[Key]:
        found = answers.get(headers.get(name), ())
        return found if isinstance(found, tuple) else found(headers)

    return answer


def _busiest(nodes: Iterable[Node]) -> str | None:
    """Returns the header that distinguishes the most filters."""
    counts = Counter(name for node in nodes for name, _ in _guards(node))
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    return name if count >= SWITCH_FILTERS_MIN else None


def _guards(node: Node) -> Iterator[tuple[str, Node]]:
    """Yields the terms that a filter needs to be TRUE and that a lookup can decide; the last one per header counts."""
    terms = node.terms if isinstance(node, And) else (node,)
    for term in terms:
        match term:
            case Comparison(operator=ComparisonOperator.EQ, left=left, right=str()):
                yield left.name, term
            case In(left=left, texts=texts, numbers=numbers) if not numbers and len(texts) <= SWITCH_VALUES_MAX:
                yield left.name, term


def _without(node: Node, guard: Node) -> Node:
    return all_of(term for term in node.terms if term != guard) if isinstance(node, And) else TRUE


def _texts(guard: Node) -> Iterable[str]:
    match guard:
        case Comparison(right=str() as text):
            return (text,)
        case In(texts=texts):
            return texts
        case _:
            return ()
