"""Filters by the letter of the SQL standard: slow, recursive, obviously right. Shares no code with what it judges.

NULL and the three truth values are None, True and False; AND, OR and NOT are the standard's tables, entry by entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from outbox_broker.filter.expression_tree import (
    And,
    Between,
    Comparison,
    Header,
    In,
    IsNull,
    Like,
    Literal,
    Node,
    Not,
    Or,
)

NOT_TABLE = {True: False, False: True, None: None}
AND_TABLE = {
    (True, True): True, (True, False): False, (True, None): None,
    (False, True): False, (False, False): False, (False, None): False,
    (None, True): None, (None, False): False, (None, None): None,
}  # fmt: skip
OR_TABLE = {
    (True, True): True, (True, False): True, (True, None): True,
    (False, True): True, (False, False): False, (False, None): None,
    (None, True): True, (None, False): None, (None, None): None,
}  # fmt: skip


def value_of(node: Node, headers: Mapping[str, str]) -> bool | None:
    """The expression's value."""
    match node:
        case Literal(value=value):
            return value
        case Not(term=term):
            return NOT_TABLE[value_of(term, headers)]
        case And(terms=terms):
            return reduce(lambda one, two: AND_TABLE[one, two], (value_of(term, headers) for term in terms))
        case Or(terms=terms):
            return reduce(lambda one, two: OR_TABLE[one, two], (value_of(term, headers) for term in terms))
        case Comparison(operator=operator, left=left, right=right):
            return _compared(str(operator), headers.get(left.name), right, headers)
        case Between(left=left, low=low, high=high):
            text = headers.get(left.name)
            return AND_TABLE[_compared(">=", text, low, headers), _compared("<=", text, high, headers)]
        case In(left=left, texts=texts, numbers=numbers):
            found = [_compared("=", headers.get(left.name), one, headers) for one in [*texts, *numbers]]
            return reduce(lambda one, two: OR_TABLE[one, two], found)
        case Like(left=left, pattern=pattern, escape=escape):
            text = headers.get(left.name)
            return None if text is None else fits(text, pattern, escape)
        case IsNull(left=left):
            return left.name not in headers


def fits(text: str, pattern: str, escape: str | None) -> bool:
    """LIKE, by its definition: exponential, for short texts only."""
    if not pattern:
        return not text
    head, rest = pattern[0], pattern[1:]
    if head == escape:
        return text[:1] == rest[0] and fits(text[1:], rest[1:], escape)
    if head == "%":
        return any(fits(text[skipped:], rest, escape) for skipped in range(len(text) + 1))
    return text != "" and head in ("_", text[0]) and fits(text[1:], rest, escape)


def number(text: str) -> float | None:
    """The number that a text is."""
    if len(text) > 64 or not set(text) <= set("0123456789+-.eE"):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    if value in (float("inf"), float("-inf")) and set(text) & set(".eE"):
        return None
    return int(text) if set(text) <= set("0123456789+-") else value


def _compared(operator: str, text: str | None, other: Any, headers: Mapping[str, str]) -> bool | None:
    one: Any = text
    two: Any = other
    if isinstance(other, Header):
        two = headers.get(other.name)
        if operator not in ("=", "<>"):
            one, two = (None if side is None else number(side) for side in (one, two))
    elif isinstance(other, bool):
        one = None if text is None else {"true": True, "false": False}.get(text.lower())
    elif not isinstance(other, str):
        one = None if text is None else number(text)
    if one is None or two is None:
        return None
    return {
        "=": lambda: one == two, "<>": lambda: one != two, "<": lambda: one < two,
        "<=": lambda: one <= two, ">": lambda: one > two, ">=": lambda: one >= two,
    }[operator]()  # fmt: skip
