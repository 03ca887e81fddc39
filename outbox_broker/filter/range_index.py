"""Range index: filters that compare one header with numbers, ordered by number.
The header is parsed once, and bisection finds the matching filters. Only `<`, `<=`, `>` and `>=`, each as the whole
remainder of a filter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Generic, TypeAlias, TypeVar

from outbox_broker.filter.compiler import Headers
from outbox_broker.filter.expression_tree import Comparison, ComparisonOperator, Node
from outbox_broker.filter.header_values import number_of

RANGE_FILTERS_MIN: Final = 2
"""A single filter is faster to call."""

Key = TypeVar("Key", bound=Hashable)
Cut: TypeAlias = Callable[[list[float], float], int]

_ABOVE: Final[dict[ComparisonOperator, Cut]] = {ComparisonOperator.GT: bisect_left, ComparisonOperator.GE: bisect_right}
"""`header > bound` is true for the bounds before the cut."""
_BELOW: Final[dict[ComparisonOperator, Cut]] = {ComparisonOperator.LT: bisect_right, ComparisonOperator.LE: bisect_left}
"""`header < bound` is true for the bounds from the cut on."""


@dataclass(frozen=True, slots=True)
class OperatorBounds(Generic[Key]):
    """Filters with one operator: their ordered bounds, all their keys, and where each bound's keys begin.

    Those that match a number are before the cut (`holds_before`), or from it on.
    """

    cut: Cut
    holds_before: bool
    bounds: list[float]
    starts: list[int]
    keys: tuple[Key, ...]

    def found(self, number: float) -> tuple[Key, ...]:
        """Returns the keys of the filters that match a number."""
        place = self.starts[self.cut(self.bounds, number)]
        return self.keys[:place] if self.holds_before else self.keys[place:]


@dataclass(frozen=True, slots=True)
class RangeIndex(Generic[Key]):
    """All range filters on one header; `nodes` are the filters."""

    name: str
    operators: tuple[OperatorBounds[Key], ...]
    nodes: tuple[Node, ...]

    def collect(self, headers: Headers, found: list[Key]) -> None:
        """Append all keys that match."""
        text = headers.get(self.name)
        number = None if text is None else number_of(text)
        if number is not None:
            for operators in self.operators:
                found += operators.found(number)

    def found(self, headers: Headers) -> Sequence[Key]:
        """Returns all keys that match."""
        if len(self.operators) == 1:
            text = headers.get(self.name)
            number = None if text is None else number_of(text)
            return () if number is None else self.operators[0].found(number)
        found: list[Key] = []
        self.collect(headers, found)
        return found


def range_indexes_of(members: Mapping[Node, tuple[Key, ...]]) -> tuple[RangeIndex[Key], ...]:
    """Build the range indexes for those of the filters that qualify."""
    by_header: defaultdict[str, list[Comparison]] = defaultdict(list)
    for node in members:
        if isinstance(node, Comparison) and _is_number(node.right) and node.operator in {*_ABOVE, *_BELOW}:
            by_header[node.left.name].append(node)
    return tuple(
        RangeIndex(name, tuple(_bounds_of(operator, nodes, members) for operator in _operators(nodes)), tuple(nodes))
        for name, nodes in by_header.items()
        if len(nodes) >= RANGE_FILTERS_MIN
    )


def _bounds_of(
    operator: ComparisonOperator, nodes: list[Comparison], members: Mapping[Node, tuple[Key, ...]]
) -> OperatorBounds[Key]:
    ordered = sorted((node for node in nodes if node.operator is operator), key=_bound)
    starts = [0, *accumulate(len(members[node]) for node in ordered)]
    keys = tuple(key for node in ordered for key in members[node])
    cut = _ABOVE[operator] if operator in _ABOVE else _BELOW[operator]
    return OperatorBounds(cut, operator in _ABOVE, [_bound(node) for node in ordered], starts, keys)


def _operators(nodes: list[Comparison]) -> list[ComparisonOperator]:
    return list(dict.fromkeys(node.operator for node in nodes))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound(node: Comparison) -> float:
    return node.right  # type: ignore[return-value] # only filters with numbers get here
