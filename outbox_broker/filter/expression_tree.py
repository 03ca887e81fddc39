"""A filter expression as an immutable tree, constant folding of AND, OR and NOT, and its text. No evaluation.

SQL's three values are True, False and None, which is "unknown": the result of a comparison with a missing header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

KEYWORDS: Final = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"})
_BARE_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]*", re.ASCII)
_OR, _AND, _NOT, _TEST = range(4)


class ComparisonOperator(StrEnum):
    """The comparison operators."""

    EQ = "="
    NE = "<>"
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


Constant: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Header:
    """The text of a header, or NULL if the message has none of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """TRUE, FALSE or, as the result of partial evaluation only, unknown."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A header compared with a constant or another header; the header is on the left.

    The constant's type is part of the value: `1` and `TRUE` are equal to Python, but not the same comparison.
    """

    operator: ComparisonOperator
    left: Header
    right: Header | Constant
    kind: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.right).__name__)


@dataclass(frozen=True, slots=True)
class Between:
    """`low <= header <= high`; both bounds are numbers, or both are texts."""

    left: Header
    low: str | float
    high: str | float


@dataclass(frozen=True, slots=True)
class In:
    """A header that equals one of these texts, or reads as one of these numbers."""

    left: Header
    texts: frozenset[str]
    numbers: frozenset[float]


@dataclass(frozen=True, slots=True)
class Like:
    """A header that matches a pattern with `%` (any run) and `_` (any one character)."""

    left: Header
    pattern: str
    escape: str | None


@dataclass(frozen=True, slots=True)
class IsNull:
    """A header that the message does not have."""

    left: Header


@dataclass(frozen=True, slots=True)
class Not:
    """NOT: unknown stays unknown."""

    term: Node


@dataclass(frozen=True, slots=True)
class And:
    """All of two or more terms."""

    terms: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Any of two or more terms."""

    terms: tuple[Node, ...]


Test: TypeAlias = Comparison | Between | In | Like | IsNull
Node: TypeAlias = Literal | Test | Not | And | Or

TRUE: Final = Literal(value=True)
FALSE: Final = Literal(value=False)
UNKNOWN: Final = Literal(value=None)


def all_of(terms: Iterable[Node]) -> Node:
    """AND, folded: FALSE decides, TRUE and repetitions are dropped, nested ANDs are flattened."""
    return _folded(terms, And, decides=FALSE, neutral=TRUE)


def any_of(terms: Iterable[Node]) -> Node:
    """OR, folded: TRUE decides, FALSE and repetitions are dropped, nested ORs are flattened."""
    return _folded(terms, Or, decides=TRUE, neutral=FALSE)


def negated(term: Node) -> Node:
    """NOT, folded: of a constant, and of another NOT."""
    match term:
        case Literal(value=value):
            return UNKNOWN if value is None else FALSE if value else TRUE
        case Not(term=inner):
            return inner
        case _:
            return Not(term)


def headers_of(test: Test) -> tuple[str, ...]:
    """Returns the header names that a test reads."""
    if isinstance(test, Comparison) and isinstance(test.right, Header):
        return test.left.name, test.right.name
    return (test.left.name,)


def tests_in(node: Node) -> Iterator[Test]:
    """Yields every test of an expression, without recursion."""
    pending: list[Node] = [node]
    while pending:
        match pending.pop():
            case Literal():
                continue
            case Not(term=term):
                pending.append(term)
            case And(terms=terms) | Or(terms=terms):
                pending.extend(terms)
            case Comparison() | Between() | In() | Like() | IsNull() as test:
                yield test


def _folded(terms: Iterable[Node], kind: type[And | Or], *, decides: Literal, neutral: Literal) -> Node:
    flat: dict[Node, None] = {}
    for term in terms:
        if term == decides:
            return decides
        if isinstance(term, kind):
            flat.update(dict.fromkeys(term.terms))
        elif term != neutral:
            flat[term] = None
    if len(flat) < 2:
        return next(iter(flat), neutral)
    return kind(tuple(flat))


def render(node: Node) -> str:
    """Returns the expression's text, with the fewest possible parentheses. Parsing the text gives the same tree."""
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
