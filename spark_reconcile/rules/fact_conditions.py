"""Conditions over whole numbers, as data, written as SQL. No verdicts.

Every fact is a number that is never null (0 or -1 for absent), so that two-valued logic holds: what a condition does
not select, its negation does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never


class _Comparable:
    """Comparisons of a term, each of which returns a predicate."""

    __slots__ = ()

    def is_(self, other: Operand) -> Predicate:
        return Compare(self._term(), "=", _term_of(other))

    def is_not(self, other: Operand) -> Predicate:
        return Negation(self.is_(other))

    def __ge__(self, other: Operand) -> Predicate:
        return Compare(self._term(), ">=", _term_of(other))

    def __gt__(self, other: Operand) -> Predicate:
        return Compare(self._term(), ">", _term_of(other))

    def __le__(self, other: Operand) -> Predicate:
        return Compare(_term_of(other), ">=", self._term())

    def __lt__(self, other: Operand) -> Predicate:
        return Compare(_term_of(other), ">", self._term())

    def __add__(self, other: Operand) -> Sum:
        return Sum(self._term(), _term_of(other), 1)

    def __sub__(self, other: Operand) -> Sum:
        return Sum(self._term(), _term_of(other), -1)

    def _term(self) -> Term:
        if isinstance(self, Fact | Number | Sum):
            return self
        raise TypeError(f"not a term: {type(self).__name__}")


class _Combinable:
    """Operators that combine predicates."""

    __slots__ = ()

    def __and__(self, other: Predicate) -> Predicate:
        return Conjunction(self._predicate(), other)

    def __or__(self, other: Predicate) -> Predicate:
        return Disjunction(self._predicate(), other)

    def __invert__(self) -> Predicate:
        return Negation(self._predicate())

    def _predicate(self) -> Predicate:
        if isinstance(self, Compare | Conjunction | Disjunction | Negation | AlwaysTrue):
            return self
        raise TypeError(f"not a predicate: {type(self).__name__}")


@dataclass(frozen=True, slots=True)
class Fact(_Comparable):
    """A named number of the evidence or of the run's bounds."""

    name: str


@dataclass(frozen=True, slots=True)
class Number(_Comparable):
    """A constant."""

    value: int


@dataclass(frozen=True, slots=True)
class Sum(_Comparable):
    """left + sign * right."""

    left: Term
    right: Term
    sign: int


@dataclass(frozen=True, slots=True)
class Compare(_Combinable):
    """left (=, >=, >) right."""

    left: Term
    operator: str
    right: Term


@dataclass(frozen=True, slots=True)
class Conjunction(_Combinable):
    """A condition that is true if both are."""

    left: Predicate
    right: Predicate


@dataclass(frozen=True, slots=True)
class Disjunction(_Combinable):
    """A condition that is true if at least one is."""

    left: Predicate
    right: Predicate


@dataclass(frozen=True, slots=True)
class Negation(_Combinable):
    """A condition that is true if the other is false."""

    inner: Predicate


@dataclass(frozen=True, slots=True)
class AlwaysTrue(_Combinable):
    """A condition that is true for every row."""


Term = Fact | Number | Sum
Predicate = Compare | Conjunction | Disjunction | Negation | AlwaysTrue
Operand = Term | int


def newer(time: Fact, bound: Sum) -> Predicate:
    """Returns a predicate: a fact is later than the bound, and plausible: records years ahead are not in transit."""
    return (time > bound) & (time <= Fact("latest_ms"))


def sql(predicate: Predicate, bounds: Mapping[str, int]) -> str:
    """Returns the predicate in Spark SQL; facts named in `bounds` become numbers, all others columns."""
    match predicate:
        case Compare(left, operator, right):
            return f"({_sql_term(left, bounds)} {operator} {_sql_term(right, bounds)})"
        case Conjunction(left, right):
            return f"({sql(left, bounds)} and {sql(right, bounds)})"
        case Disjunction(left, right):
            return f"({sql(left, bounds)} or {sql(right, bounds)})"
        case Negation(inner):
            return f"(not {sql(inner, bounds)})"
        case AlwaysTrue():
            return "true"
        case _:
            assert_never(predicate)


def facts_in(predicate: Predicate) -> set[str]:
    """Returns the names of all facts in the predicate."""
    match predicate:
        case Compare(left, _, right):
            return {*_names(left), *_names(right)}
        case Conjunction(left, right) | Disjunction(left, right):
            return facts_in(left) | facts_in(right)
        case Negation(inner):
            return facts_in(inner)
        case AlwaysTrue():
            return set()
        case _:
            assert_never(predicate)


def _sql_term(term: Term, bounds: Mapping[str, int]) -> str:
    match term:
        case Fact(name):
            return f"{bounds[name]}L" if name in bounds else f"`{name}`"
        case Number(value):
            return f"{value}L"
        case Sum(left, right, sign):
            return f"({_sql_term(left, bounds)} {'+' if sign > 0 else '-'} {_sql_term(right, bounds)})"
        case _:
            assert_never(term)


def _names(term: Term) -> Iterator[str]:
    match term:
        case Fact(name):
            yield name
        case Number():
            return
        case Sum(left, right, _):
            yield from _names(left)
            yield from _names(right)
        case _:
            assert_never(term)


def _term_of(operand: Operand) -> Term:
    return Number(operand) if isinstance(operand, int) else operand
