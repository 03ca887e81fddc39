"""Spark SQL expressions as SQLite takes them, and the functions of Spark's that SQLite lacks. It runs no query.

What an expression means is the same in both, nulls included, or it is refused here: an expression that uses something
new fails in its first test, and does not go on with another meaning.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, cast

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)|(?P<text>'(?:[^'\\]|\\.)*')|(?P<name>`[^`]*`)|(?P<number>\d+L?(?![\w.]))
    |(?P<word>[A-Za-z_]\w*(?:\s*\()?)|(?P<sign><=>|\|\||!=|>=|<=|[-+*/%()=<>&|,.])""",
    re.VERBOSE,
)
_SAME: Final = frozenset(
    {"abs", "and", "as", "between", "by", "cast", "coalesce", "count", "else", "in", "max", "min", "not", "nullif",
     "or", "over", "row_number", "sum", "then", "when"}
)  # fmt: skip
"""What may stand before a parenthesis, and means the same."""
_CALLS: Final = {
    "if": ("iif(", ")"),
    "count_if": ("count(nullif(", ", 0))"),
    "bool_or": ("max(", ")"),
    "substring": ("substr(", ")"),
    **{
        name: (f"{name}(", ")")
        for name in ("conv", "greatest", "least", "length", "max_by", "pmod", "rlike", "sha2", "shiftright", "xxhash64")
    },
}
"""A function as what stands before and after its arguments; those that are made below keep their names."""
_WORDS: Final = {"div": "/", "string": "text", "<=>": "is"}
_HEX: Final = re.compile(r"[0-9A-Fa-f]+")


@lru_cache(maxsize=4096)
def translated(expression: str) -> str:
    """The same for SQLite. Raises ValueError for what this module does not know."""
    written, closing = [], []
    for kind, token in _tokens(expression):
        match kind:
            case "text":
                written.append("'" + re.sub(r"\\(.)", r"\1", token[1:-1]).replace("'", "''") + "'")
            case "name":
                written.append(token)
            case "number":
                written.append(token.rstrip("L"))
            case "word" if token.endswith("("):
                before, after = _call(token[:-1].rstrip(), expression)
                written.append(before)
                closing.append(after)
            case "sign" if token == "(":  # noqa: S105
                written.append("(")
                closing.append(")")
            case "sign" if token == ")":  # noqa: S105
                written.append(closing.pop())
            case _:
                written.append(_WORDS.get(token, token))
    return "".join(written)


def add_functions(connection: sqlite3.Connection) -> None:
    """Make the functions known that SQLite lacks, or has with another meaning."""
    for name, arguments, function in (
        ("conv", 3, _conv), ("greatest", -1, _greatest), ("least", -1, _least), ("length", 1, _length),
        ("pmod", 2, _pmod), ("rlike", 2, _rlike), ("sha2", 2, _sha2), ("shiftright", 2, _shiftright),
        ("xxhash64", -1, _hash),
    ):  # fmt: skip
        connection.create_function(name, arguments, function, deterministic=True)
    connection.create_aggregate("max_by", 2, cast("Any", _MaxBy))


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"no expression that SQLite is given: {expression[at:]!r} in {expression!r}")
        yield found.lastgroup, found.group()
        at = found.end()


def _call(name: str, expression: str) -> tuple[str, str]:
    if name.lower() in _SAME:
        return f"{name} (" if name.lower() in {"in", "and", "or", "not", "as", "over"} else f"{name}(", ")"
    if name not in _CALLS:
        raise ValueError(f"{name}() is not known to be the same in Spark and SQLite: {expression!r}")
    return _CALLS[name]


def _conv(digits: str | None, base: int, to: int) -> str | None:
    """Of digits with something else behind them, those; of none, 0. Spaces around them count for nothing."""
    if (base, to) != (16, 10):
        raise ValueError("only from hexadecimal to decimal")
    if digits is None or not digits:
        return None
    found = _HEX.match(digits.strip(" "))
    return str(int(found.group(), 16)) if found else "0"


def _greatest(*values: Any) -> Any:
    return max((one for one in values if one is not None), default=None)


def _least(*values: Any) -> Any:
    return min((one for one in values if one is not None), default=None)


def _length(text: str | None) -> int | None:
    """Not the built-in one: that ends at a null character."""
    return None if text is None else len(text)


def _pmod(value: int | None, by: int) -> int | None:
    return None if value is None else value % by


def _rlike(text: str | None, expression: str | None) -> bool | None:
    return None if text is None or expression is None else re.search(expression, text) is not None


def _sha2(text: str | None, bits: int) -> str | None:
    if bits != 256:
        raise ValueError("only of 256 bits")
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def _shiftright(value: int | None, by: int) -> int | None:
    return None if value is None else value >> by


def _hash(*values: Any) -> int:
    """Another hash of as many bits: no number of Spark's is compared with one of these. As there, null adds nothing."""
    told = repr([one for one in values if one is not None]).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big", signed=True)


class _MaxBy:
    """The first value where the second is highest."""

    def __init__(self) -> None:
        self._value: int | None = None
        self._by: int | None = None

    def step(self, *values: int | None) -> None:
        value, by = values
        if by is not None and (self._by is None or by > self._by):
            self._value, self._by = value, by

    def finalize(self) -> int | None:
        return self._value
