"""Compiles a filter's tree to a function of a message's headers. No code is generated; nothing of the text is executed.

A filter is asked one question only: is the expression TRUE? NOT x is TRUE if x is FALSE, and so on downwards: each node
is asked for one of its values, "is it TRUE" or "is it FALSE", and answers yes or no. Unknown answers no to both, so
three-valued logic costs nothing, and Python's own `and` and `or` do the rest.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, assert_never

from outbox_broker.filter.expression_tree import (
    And,
    Between,
    Comparison,
    ComparisonOperator,
    Constant,
    Header,
    In,
    IsNull,
    Like,
    Literal,
    Node,
    Not,
    Or,
    Test,
)
from outbox_broker.filter.like_pattern import matcher

Headers: TypeAlias = Mapping[str, str]
Predicate: TypeAlias = Callable[[Headers], bool]

NUMBER_CHARS_MAX: Final = 64
"""A longer text is not a number: parsing it would take time quadratic in its length."""

_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII).fullmatch
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII).fullmatch
_TRUTHS: Final = {"true": True, "false": False}
_OPERATORS: Final[dict[ComparisonOperator, Callable[[Any, Any], bool]]] = {
    ComparisonOperator.EQ: operator.eq,
    ComparisonOperator.NE: operator.ne,
    ComparisonOperator.LT: operator.lt,
    ComparisonOperator.LE: operator.le,
    ComparisonOperator.GT: operator.gt,
    ComparisonOperator.GE: operator.ge,
}
_OPPOSITE: Final = {
    ComparisonOperator.EQ: ComparisonOperator.NE,
    ComparisonOperator.NE: ComparisonOperator.EQ,
    ComparisonOperator.LT: ComparisonOperator.GE,
    ComparisonOperator.GE: ComparisonOperator.LT,
    ComparisonOperator.GT: ComparisonOperator.LE,
    ComparisonOperator.LE: ComparisonOperator.GT,
}


def compile_condition(node: Node, *, wanted: bool = True) -> Predicate:
    """Returns a predicate: whether the expression has the `wanted` value for given headers; unknown has neither."""
    match node:
        case Literal(value=value):
            return _always if value is wanted else _never
        case Not(term=term):
            return compile_condition(term, wanted=not wanted)
        case And(terms=terms):
            return _joined([compile_condition(term, wanted=wanted) for term in terms], every=wanted)
        case Or(terms=terms):
            return _joined([compile_condition(term, wanted=wanted) for term in terms], every=not wanted)
        case _:
            return _compile_test(node, wanted=wanted)


def outcome(test: Test, headers: Headers) -> bool | None:
    """Returns a test's value: TRUE, FALSE or unknown."""
    if compile_condition(test)(headers):
        return True
    return False if compile_condition(test, wanted=False)(headers) else None


def _compile_test(test: Test, *, wanted: bool) -> Predicate:
    match test:
        case Comparison(operator=spelt, left=left, right=right):
            return _comparison(spelt if wanted else _OPPOSITE[spelt], left.name, right)
        case Between(left=left, low=low, high=high):
            return _between(left.name, low, high, wanted=wanted)
        case In(left=left, texts=texts, numbers=numbers):
            return _within(left.name, texts, numbers, wanted=wanted)
        case Like(left=left, pattern=pattern, escape=escape):
            return _fitting(left.name, matcher(pattern, escape), wanted=wanted)
        case IsNull(left=left):
            name = left.name
            return (lambda headers: name not in headers) if wanted else (lambda headers: name in headers)
        case _:
            assert_never(test)


def _comparison(spelt: ComparisonOperator, name: str, right: Header | Constant) -> Predicate:
    match right:
        case Header(name=other):
            return _two_headers(spelt, name, other)
        case bool():
            same = right if spelt is ComparisonOperator.EQ else not right
            return lambda headers: (text := headers.get(name)) is not None and truth_of(text) is same
        case str():
            return _text(spelt, name, right)
        case _:
            return _number(spelt, name, right)


def _text(spelt: ComparisonOperator, name: str, right: str) -> Predicate:
    if spelt is ComparisonOperator.EQ:
        return lambda headers: headers.get(name) == right
    compare = _OPERATORS[spelt]
    return lambda headers: (text := headers.get(name)) is not None and compare(text, right)


def _number(spelt: ComparisonOperator, name: str, right: float) -> Predicate:
    compare = _OPERATORS[spelt]

    def test(headers: Headers) -> bool:
        text = headers.get(name)
        if text is None:
            return False
        # A text that is no number makes the comparison unknown. RocketMQ throws, and matches nothing: that is the same
        # but for the other arm of an OR, which still counts here. `1.0` equals 1, where RocketMQ reads no number.
        number = number_of(text)
        return number is not None and compare(number, right)

    return test


def _two_headers(spelt: ComparisonOperator, name: str, other: str) -> Predicate:
    compare = _OPERATORS[spelt]
    read: Callable[[str], Any] = str if spelt in {ComparisonOperator.EQ, ComparisonOperator.NE} else number_of

    def test(headers: Headers) -> bool:
        left, right = headers.get(name), headers.get(other)
        if left is None or right is None:
            return False
        left_value, right_value = read(left), read(right)
        return left_value is not None and right_value is not None and compare(left_value, right_value)

    return test


def _between(name: str, low: Any, high: Any, *, wanted: bool) -> Predicate:
    read: Callable[[str], Any] = str if isinstance(low, str) else number_of

    def test(headers: Headers) -> bool:
        text = headers.get(name)
        if text is None:
            return False
        value = read(text)
        return value is not None and (low <= value <= high) is wanted

    return test


def _within(name: str, texts: frozenset[str], numbers: frozenset[float], *, wanted: bool) -> Predicate:
    if not numbers:
        if wanted:
            return lambda headers: headers.get(name) in texts
        return lambda headers: (text := headers.get(name)) is not None and text not in texts

    def test(headers: Headers) -> bool:
        text = headers.get(name)
        if text is None:
            return False
        if text in texts:
            return wanted
        number = number_of(text)
        return number is not None and (number in numbers) is wanted

    return test


def _fitting(name: str, fits: Callable[[str], bool], *, wanted: bool) -> Predicate:
    return lambda headers: (text := headers.get(name)) is not None and fits(text) is wanted


def _joined(terms: list[Predicate], *, every: bool) -> Predicate:
    match terms:
        case [first, second]:
            if every:
                return lambda headers: first(headers) and second(headers)
            return lambda headers: first(headers) or second(headers)
        case [first, second, third]:
            if every:
                return lambda headers: first(headers) and second(headers) and third(headers)
            return lambda headers: first(headers) or second(headers) or third(headers)
        case _:
            return _joined_long(tuple(terms), every=every)


def _joined_long(terms: tuple[Predicate, ...], *, every: bool) -> Predicate:
    def test(headers: Headers) -> bool:
        for term in terms:
            if term(headers) is not every:
                return not every
        return every

    return test


def _always(_headers: Headers) -> bool:
    return True


def _never(_headers: Headers) -> bool:
    return False


def number_of(text: str) -> float | None:
    """Parses the text of a header as a number: `-7`, `3.5`, `.5`, `1e-3`; None for every other text.

    Integers are exact whatever their size, everything else is an IEEE double. Surrounding blanks, NaN, Infinity,
    hexadecimal digits and `1_000` are rejected: programs that write them do not agree about them.
    """
    if len(text) > NUMBER_CHARS_MAX:
        return None
    if (text.isdecimal() and text.isascii()) or _INTEGER(text):
        return int(text)
    if _DECIMAL(text):
        number = float(text)
        return number if math.isfinite(number) else None
    return None


def truth_of(text: str) -> bool | None:
    """Parses the text of a header as a truth value: `true` and `false` in any case; None for every other text."""
    return _TRUTHS.get(text.lower()) if len(text) <= 5 else None
