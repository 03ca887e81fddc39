"""Renders a filter expression as text, with the fewest possible parentheses. Parsing the text gives the same tree."""

from __future__ import annotations

import re
from typing import Final, assert_never

from outbox_broker.filter.expression_tree import (
    And,
    Between,
    Comparison,
    Constant,
    Header,
    In,
    IsNull,
    Like,
    Literal,
    Node,
    Not,
    Or,
)

KEYWORDS: Final = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"})
_BARE_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]*", re.ASCII)
_OR, _AND, _NOT, _TEST = range(4)


def render(node: Node) -> str:
    """Returns the expression's text."""
    return _render(node)[0]


def quoted(name: str) -> str:
    """Returns a header's name as spelt in an expression."""
    bare = _BARE_NAME.fullmatch(name) and name.upper() not in KEYWORDS
    return name if bare else f'"{name}"'


def _render(node: Node) -> tuple[str, int]:
    """Returns the text and its binding strength."""
    match node:
        case Or(terms=terms):
            return " OR ".join(_within(term, _AND) for term in terms), _OR
        case And(terms=terms):
            return " AND ".join(_within(term, _NOT) for term in terms), _AND
        case Not(term=term):
            return f"NOT {_within(term, _NOT)}", _NOT
        case Literal(value=value):
            return {True: "TRUE", False: "FALSE", None: "UNKNOWN"}[value], _TEST
        case Comparison(operator=operator, left=left, right=right):
            return f"{quoted(left.name)} {operator} {_operand(right)}", _TEST
        case Between(left=left, low=low, high=high):
            return f"{quoted(left.name)} BETWEEN {_operand(low)} AND {_operand(high)}", _TEST
        case In(left=left, texts=texts, numbers=numbers):
            values = [*(_operand(text) for text in sorted(texts)), *(_operand(number) for number in sorted(numbers))]
            return f"{quoted(left.name)} IN ({', '.join(values)})", _TEST
        case Like(left=left, pattern=pattern, escape=escape):
            ending = "" if escape is None else f" ESCAPE {_operand(escape)}"
            return f"{quoted(left.name)} LIKE {_operand(pattern)}{ending}", _TEST
        case IsNull(left=left):
            return f"{quoted(left.name)} IS NULL", _TEST
        case _:
            assert_never(node)


def _within(node: Node, binds: int) -> str:
    text, tightness = _render(node)
    return text if tightness >= binds else f"({text})"


def _operand(value: Header | Constant) -> str:
    match value:
        case Header(name=name):
            return quoted(name)
        case bool():
            return "TRUE" if value else "FALSE"
        case str():
            return "'" + value.replace("'", "''") + "'"
        case _:
            return repr(value)
