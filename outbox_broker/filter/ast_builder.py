"""Builds the nodes of a filter's tree from the grammar's rules, and rejects valid syntax without meaning."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lark import Token, Transformer

from outbox_broker.filter.expression_tree import (
    FALSE,
    TRUE,
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
    all_of,
    any_of,
    negated,
)
from outbox_broker.filter.header_values import NUMBER_CHARS_MAX, number_of
from outbox_broker.filter.like_pattern import pieces_of, plain_text
from outbox_core.common.errors import FilterError, InvalidMessage
from outbox_core.messages.message import check_headers

IN_VALUES_MAX: Final = 1_000
LIKE_CHARS_MAX: Final = 256

_TURNED: Final = {
    ComparisonOperator.EQ: ComparisonOperator.EQ,
    ComparisonOperator.NE: ComparisonOperator.NE,
    ComparisonOperator.LT: ComparisonOperator.GT,
    ComparisonOperator.LE: ComparisonOperator.GE,
    ComparisonOperator.GT: ComparisonOperator.LT,
    ComparisonOperator.GE: ComparisonOperator.LE,
}
_EQUALITIES: Final = frozenset({ComparisonOperator.EQ, ComparisonOperator.NE})


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a comparison, and its position in the text, from 1."""

    value: Header | Constant
    position: int


class AstBuilder(Transformer[Token, Node]):
    """Called by the parser, rule by rule; children come first."""

    def either(self, terms: list[Node]) -> Node:
        """OR."""
        return any_of(terms)

    def both(self, terms: list[Node]) -> Node:
        """AND."""
        return all_of(terms)

    def negation(self, terms: list[Node]) -> Node:
        """NOT."""
        return negated(terms[0])

    def truth(self, tokens: list[Token]) -> Node:
        """TRUE or FALSE as a condition."""
        return TRUE if tokens[0].type == "TRUE" else FALSE

    def operand(self, tokens: list[Token]) -> Operand:
        """A header or a constant."""
        (token,) = tokens
        position = (token.start_pos or 0) + 1
        return Operand(_OPERANDS[token.type](str(token), position), position)

    def comparison(self, parts: list[Any]) -> Node:
        """A comparison by an operator."""
        left, operator, right = parts
        return _comparison(ComparisonOperator(str(operator)), left, right)

    def between(self, operands: list[Operand]) -> Node:
        """`a BETWEEN b AND c` is `a >= b AND a <= c`."""
        subject, low, high = operands
        match subject.value, low.value, high.value:
            case (Header() as header, str() as least, str() as most):
                return Between(header, least, most)
            case (Header() as header, int() | float() as least, int() | float() as most) if not _any_truth(low, high):
                return Between(header, least, most)
        at_least = _comparison(ComparisonOperator.GE, subject, low)
        return all_of([at_least, _comparison(ComparisonOperator.LE, subject, high)])

    def not_between(self, operands: list[Operand]) -> Node:
        """NOT BETWEEN."""
        return negated(self.between(operands))

    def within(self, parts: list[Any]) -> Node:
        """IN."""
        subject, _, *listed = parts
        header = _header(subject, "IN")
        if len(listed) > IN_VALUES_MAX:
            raise FilterError(
                f"IN lists {len(listed):,} values; at most {IN_VALUES_MAX:,} are allowed", position=subject.position
            )
        for operand in listed:
            if isinstance(operand.value, Header | bool):
                raise FilterError("IN lists texts and numbers only", position=operand.position)
        texts = frozenset(operand.value for operand in listed if isinstance(operand.value, str))
        numbers = frozenset(operand.value for operand in listed if not isinstance(operand.value, str))
        if len(texts) + len(numbers) == 1:
            return Comparison(ComparisonOperator.EQ, header, next(iter(texts | numbers)))
        return In(header, texts, numbers)

    def not_within(self, parts: list[Any]) -> Node:
        """NOT IN."""
        return negated(self.within(parts))

    def pattern(self, tokens: list[Token]) -> list[Token]:
        """The pattern after LIKE."""
        return tokens

    def like(self, parts: list[Any]) -> Node:
        """LIKE; a pattern that matches only one text becomes an equality."""
        subject, _, tokens = parts
        header = _header(subject, "LIKE")
        pattern, *escape = [_text(str(token), 0) for token in tokens]
        position = (tokens[0].start_pos or 0) + 1
        if len(pattern) > LIKE_CHARS_MAX:
            raise FilterError(f"a pattern may have at most {LIKE_CHARS_MAX} characters", position=position)
        if escape and len(escape[0]) != 1:
            raise FilterError("ESCAPE takes one character", position=(tokens[1].start_pos or 0) + 1)
        try:
            only = plain_text(pieces_of(pattern, escape[0] if escape else None))
        except ValueError as error:
            raise FilterError(str(error), position=position) from error
        if only is not None:
            return Comparison(ComparisonOperator.EQ, header, only)
        return Like(header, pattern, escape[0] if escape else None)

    def not_like(self, parts: list[Any]) -> Node:
        """NOT LIKE."""
        return negated(self.like(parts))

    def null(self, parts: list[Any]) -> Node:
        """IS NULL."""
        return IsNull(_header(parts[0], "IS NULL"))

    def not_null(self, parts: list[Any]) -> Node:
        """IS NOT NULL."""
        return negated(self.null(parts))


def _comparison(operator: ComparisonOperator, left: Operand, right: Operand) -> Node:
    match left.value, right.value:
        case Header() as header, other:
            pass
        case other, Header() as header:
            operator = _TURNED[operator]
        case constant, other:
            return _folded(operator, constant, other, position=left.position)
    if isinstance(other, bool) and operator not in _EQUALITIES:
        raise FilterError("TRUE and FALSE can be compared by = and <> only", position=left.position)
    return Comparison(operator, header, other)


def _folded(operator: ComparisonOperator, constant: Any, other: Any, *, position: int) -> Literal:
    """Evaluates a comparison of two constants, as in `1 = 1`."""
    truths = isinstance(constant, bool), isinstance(other, bool)
    if any(truths) != all(truths) or isinstance(constant, str) != isinstance(other, str):
        raise FilterError("two constants of different types are compared; name a header", position=position)
    if any(truths) and operator not in _EQUALITIES:
        raise FilterError("TRUE and FALSE can be compared by = and <> only", position=position)
    match operator:
        case ComparisonOperator.EQ | ComparisonOperator.NE:
            return TRUE if (constant == other) is (operator is ComparisonOperator.EQ) else FALSE
        case ComparisonOperator.LT | ComparisonOperator.GE:
            return TRUE if (constant < other) is (operator is ComparisonOperator.LT) else FALSE
        case ComparisonOperator.GT | ComparisonOperator.LE:
            return TRUE if (constant > other) is (operator is ComparisonOperator.GT) else FALSE


def _header(operand: Operand, operator_name: str) -> Header:
    if not isinstance(operand.value, Header):
        raise FilterError(
            f"left of {operator_name} stands the name of a header, not a constant", position=operand.position
        )
    return operand.value


def _any_truth(*operands: Operand) -> bool:
    return any(isinstance(operand.value, bool) for operand in operands)


def _name(text: str, position: int) -> Header:
    name = text[1:-1] if text.startswith('"') else text
    try:
        check_headers({name: ""})
    except InvalidMessage as error:
        raise FilterError(f"{error}; texts stand in single quotes", position=position) from error
    return Header(name)


def _text(text: str, _position: int) -> str:
    return text[1:-1].replace("''", "'")


def _number(text: str, position: int) -> float:
    number = number_of(text)
    if number is None or not math.isfinite(number):
        raise FilterError(
            f"a number has at most {NUMBER_CHARS_MAX} characters and lies within the range of a double",
            position=position,
        )
    return number


_OPERANDS: Final[dict[str, Callable[[str, int], Header | Constant]]] = {
    "NAME": _name,
    "QUOTED": _name,
    "STRING": _text,
    "NUMBER": _number,
    "TRUE": lambda _text, _position: True,
    "FALSE": lambda _text, _position: False,
}
