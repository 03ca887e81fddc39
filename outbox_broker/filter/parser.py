"""Parses a filter's text to a tree, with an LALR grammar. Every rejection is a FilterError that names the cure.

The dialect is RocketMQ's SQL92 subset (its SelectorParser, derived from ActiveMQ's), with these differences: LIKE is
supported (its CONTAINS is `LIKE '%...%'`); texts can be compared with `<` etc., by code points; a header's name may
have dots and dashes, and may be quoted; NOT binds as in SQL; a bare header is no condition; BETWEEN with its bounds
exchanged is false and no error; no comments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from outbox_broker.filter.compiler import NUMBER_CHARS_MAX, number_of
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
from outbox_broker.filter.like_pattern import pieces_of, plain_text
from outbox_core.common.errors import FilterError, InvalidMessage
from outbox_core.messages.message import check_headers

FILTER_CHARS_MAX: Final = 16 * 1024
FILTER_TESTS_MAX: Final = 500
FILTER_DEPTH_MAX: Final = 50
IN_VALUES_MAX: Final = 1_000
LIKE_CHARS_MAX: Final = 256

_NAME_TAIL: Final = r"(?![A-Za-z0-9_$.-])"
_WORDS: Final = ("AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE")
_TESTS: Final = frozenset({"OPERATOR", "BETWEEN", "IN", "LIKE", "IS"})
_TURNED: Final = {
    ComparisonOperator.EQ: ComparisonOperator.EQ,
    ComparisonOperator.NE: ComparisonOperator.NE,
    ComparisonOperator.LT: ComparisonOperator.GT,
    ComparisonOperator.LE: ComparisonOperator.GE,
    ComparisonOperator.GT: ComparisonOperator.LT,
    ComparisonOperator.GE: ComparisonOperator.LE,
}
_EQUALITIES: Final = frozenset({ComparisonOperator.EQ, ComparisonOperator.NE})

_GRAMMAR: Final = r"""
?start: either
either: both (_OR both)*
both: term (_AND term)*
?term: _NOT term                                    -> negation
    | "(" either ")"
    | TRUE                                          -> truth
    | FALSE                                         -> truth
    | operand OPERATOR operand                      -> comparison
    | operand _BETWEEN operand _AND operand         -> between
    | operand _NOT _BETWEEN operand _AND operand    -> not_between
    | operand IN "(" operand ("," operand)* ")"     -> within
    | operand _NOT IN "(" operand ("," operand)* ")" -> not_within
    | operand LIKE pattern                          -> like
    | operand _NOT LIKE pattern                     -> not_like
    | operand IS NULL                               -> null
    | operand IS _NOT NULL                          -> not_null
pattern: STRING [_ESCAPE STRING]
operand: NAME | QUOTED | STRING | NUMBER | TRUE | FALSE

OPERATOR: "<>" | "<=" | ">=" | "=" | "<" | ">"
NUMBER: /[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_$."])/
STRING: /'[^']*(?:''[^']*)*'(?!')/
QUOTED: /"[^"]*"/
NAME: /[A-Za-z_$][A-Za-z0-9_$.-]*/
%ignore /[ \t\r\n\f]+/
"""

_WISHES: Final = {
    "OPERATOR": "a comparison",
    "NAME": "a header",
    "NUMBER": "a number",
    "STRING": "a text in single quotes",
    "RPAR": "a closing parenthesis",
    "LPAR": "an opening parenthesis",
    "_AND": "AND",
    "_OR": "OR",
    "NULL": "NULL",
    "IN": "IN",
    "_BETWEEN": "BETWEEN",
    "LIKE": "LIKE",
    "$END": "the end",
}
_CURES: Final = {
    "!": "write <> for unequal, and NOT for not",
    "&": "write AND",
    "|": "write OR",
    "'": "the text is not closed; close it with ', and write '' for a quote inside it",
    '"': 'the name is not closed; close it with "',
    "*": "there is no arithmetic",
    "+": "there is no arithmetic",
    "/": "there is no arithmetic",
    ";": "a filter is one expression; leave the semicolon out",
}


def parse(text: str) -> Node:
    """Parse a filter. Raises FilterError with the position of the mistake, and its cure."""
    _check_text(text)
    parser = _parser()
    try:
        _check_size(list(parser.lex(text)))
        return cast("Node", parser.parse(text))  # the builder turns lark's trees into nodes
    except UnexpectedCharacters as error:
        raise _of_characters(error, text) from error
    except UnexpectedToken as error:
        raise _of_token(error, text) from error
    except UnexpectedInput as error:
        raise FilterError("the filter cannot be read") from error


@lru_cache(maxsize=1)
def _parser() -> Lark:
    # LALR takes time in proportion to the text and does not recurse: a hostile filter exhausts neither stack nor clock.
    # The tables take some 40 ms, then a filter 0.1 to 0.3 ms. Of sqlglot's SQL nearly all would have to be forbidden.
    words = "\n".join(f"{_terminal(word)}.2: /{word}{_NAME_TAIL}/i" for word in _WORDS)
    return Lark(_GRAMMAR + words, parser="lalr", lexer="basic", transformer=AstBuilder(), maybe_placeholders=False)


def _terminal(word: str) -> str:
    """Returns the terminal's name; lark hides those with a leading underscore from the builder."""
    return word if word in {"IN", "LIKE", "IS", "NULL", "TRUE", "FALSE"} else f"_{word}"


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise FilterError(f"a filter is a str, not {type(text).__name__}")
    if len(text) > FILTER_CHARS_MAX:
        raise FilterError(f"the filter has {len(text):,} characters; at most {FILTER_CHARS_MAX:,} are allowed")
    if not text.strip():
        raise FilterError("the filter is empty; leave it out to get every message")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FilterError("the filter cannot be written as UTF-8", position=error.start + 1) from error


def _check_size(tokens: list[Token]) -> None:
    tests = depth = 0
    for token in tokens:
        tests += token.type in _TESTS
        depth += (token.type == "LPAR") - (token.type == "RPAR")
        if depth > FILTER_DEPTH_MAX:
            raise FilterError(f"parentheses are nested deeper than {FILTER_DEPTH_MAX}", position=_position(token))
        if tests > FILTER_TESTS_MAX:
            raise FilterError(
                f"the filter makes more than {FILTER_TESTS_MAX} comparisons; use IN for lists",
                position=_position(token),
            )


def _of_characters(error: UnexpectedCharacters, text: str) -> FilterError:
    position = cast("int", error.pos_in_stream)
    character = text[position]
    cure = _CURES.get(character, "put texts in single quotes, and names of headers that have it in double quotes")
    return FilterError(f"{character!r} cannot stand here: {cure}", position=position + 1)


def _of_token(error: UnexpectedToken, text: str) -> FilterError:
    token = error.token
    expected = _wanted(set(error.accepts or ()))
    if token.type == "$END":
        return FilterError(f"the filter ends too early: {expected}", position=len(text) + 1)
    if token.type == "NULL":
        return FilterError("nothing equals NULL; write IS NULL or IS NOT NULL", position=_position(token))
    if token.type == "OPERATOR" and str(token) == "=" and text[max(0, token.start_pos or 0) - 1] == "=":
        return FilterError("write = for equal", position=_position(token))
    return FilterError(f"{str(token)[:40]!r} cannot stand here: {expected}", position=_position(token))


def _wanted(expected: set[str]) -> str:
    wishes = [wish for name, wish in _WISHES.items() if name in expected]
    if "OPERATOR" in expected:
        wishes = ["a comparison"]  # instead of all its kinds
    return f"{' or '.join(wishes)} expected"


def _position(token: Token) -> int:
    return (token.start_pos or 0) + 1


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a comparison, and its position in the text, from 1."""

    value: Header | Constant
    position: int


class AstBuilder(Transformer[Token, Node]):
    """Builds the nodes of a filter's tree from the grammar's rules, and rejects valid syntax without meaning. Called by
    the parser, rule by rule; children come first.
    """

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
