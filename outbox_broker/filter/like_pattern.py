"""LIKE: compiles a pattern to a matcher whose time is bounded by text times pattern. No backtracking over `%`.

Between two `%` is a piece of fixed length, so the first match of a piece is as good as any later one, and nothing is
retried. Pieces with `_` become regular expressions without repetition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

Matcher: TypeAlias = Callable[[str], bool]
Piece: TypeAlias = tuple[str | None, ...]
"""Characters; None stands for any one."""

ANY_RUN: Final = "%"
ANY_ONE: Final = "_"


def pieces_of(pattern: str, escape: str | None) -> list[Piece]:
    """Splits a pattern at `%`: at least one piece, which may be empty.

    Raises ValueError if the escape character is not followed by `%`, `_` or itself.
    """
    pieces: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if escape is not None and character == escape:
            escaped = next(characters, None)
            if escaped is None or escaped not in {ANY_RUN, ANY_ONE, escape}:
                raise ValueError(f"the escape character {escape!r} may stand only before %, _ and itself")
            pieces[-1].append(escaped)
        elif character == ANY_RUN:
            pieces.append([])
        else:
            pieces[-1].append(None if character == ANY_ONE else character)
    return [tuple(piece) for piece in pieces]


def plain_text(pieces: list[Piece]) -> str | None:
    """Returns the only matching text, if there is only one."""
    return _text(pieces[0]) if len(pieces) == 1 else None


def matcher(pattern: str, escape: str | None) -> Matcher:
    """Returns a function that matches a text against the pattern; common patterns cost one call of a str method."""
    pieces = pieces_of(pattern, escape)
    texts = [_text(piece) for piece in pieces]
    match texts:
        case [str() as whole]:
            return whole.__eq__
        case [str() as head, ""]:
            return lambda text: text.startswith(head)
        case ["", str() as tail]:
            return lambda text: text.endswith(tail)
        case ["", str() as part, ""]:
            return lambda text: part in text
        case _:
            return _general(pieces)


def _general(pieces: list[Piece]) -> Matcher:
    head, tail = _regex(pieces[0]), _regex(pieces[-1])
    if len(pieces) == 1:
        return lambda text: head.fullmatch(text) is not None
    head_chars, tail_chars = len(pieces[0]), len(pieces[-1])
    middle = [_regex(piece) for piece in pieces[1:-1] if piece]

    def fits(text: str) -> bool:
        last = len(text) - tail_chars
        if last < head_chars or head.match(text) is None or tail.match(text, last) is None:
            return False
        position = head_chars
        for piece in middle:
            piece_match = piece.search(text, position, last)
            if piece_match is None:
                return False
            position = piece_match.end()
        return True

    return fits


def _regex(piece: Piece) -> re.Pattern[str]:
    return re.compile("".join("." if char is None else re.escape(char) for char in piece), re.DOTALL)


def _text(piece: Piece) -> str | None:
    chars = [char for char in piece if char is not None]
    return "".join(chars) if len(chars) == len(piece) else None
