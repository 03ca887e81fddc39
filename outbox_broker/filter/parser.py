"""Parses a filter's text to a tree, with an LALR grammar. Every rejection is a FilterError that names the cure.

The dialect is RocketMQ's SQL92 subset (its SelectorParser, derived from ActiveMQ's), with these differences: LIKE is
supported (its CONTAINS is `LIKE '%...%'`); texts can be compared with `<` etc., by code points; a header's name may
have dots and dashes, and may be quoted; NOT binds as in SQL; a bare header is no condition; BETWEEN with its bounds
exchanged is false and no error; no comments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, cast

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from outbox_broker.filter.ast_builder import AstBuilder
from outbox_broker.filter.expression_tree import Node
from outbox_core.common.errors import FilterError

FILTER_CHARS_MAX: Final = 16 * 1024
FILTER_TESTS_MAX: Final = 500
FILTER_DEPTH_MAX: Final = 50

_NAME_TAIL: Final = r"(?![A-Za-z0-9_$.-])"
_WORDS: Final = ("AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE")
_TESTS: Final = frozenset({"OPERATOR", "BETWEEN", "IN", "LIKE", "IS"})

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
            raise FilterError(f"parentheses are nested deeper than {FILTER_DEPTH_MAX}", position=_place(token))
        if tests > FILTER_TESTS_MAX:
            raise FilterError(
                f"the filter makes more than {FILTER_TESTS_MAX} comparisons; use IN for lists", position=_place(token)
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
        return FilterError("nothing equals NULL; write IS NULL or IS NOT NULL", position=_place(token))
    if token.type == "OPERATOR" and str(token) == "=" and text[max(0, token.start_pos or 0) - 1] == "=":
        return FilterError("write = for equal", position=_place(token))
    return FilterError(f"{str(token)[:40]!r} cannot stand here: {expected}", position=_place(token))


def _wanted(expected: set[str]) -> str:
    wishes = [wish for name, wish in _WISHES.items() if name in expected]
    if "OPERATOR" in expected:
        wishes = ["a comparison"]  # instead of all its kinds
    return f"{' or '.join(wishes)} expected"


def _place(token: Token) -> int:
    return (token.start_pos or 0) + 1
