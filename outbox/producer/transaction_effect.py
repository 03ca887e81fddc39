"""TransactionEffect: the effect of a statement on the transaction that it runs in, from its first words. Pure; does not
parse what the statement reads or writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import known_database


class Effect(StrEnum):
    """The effect on the transaction. `ends` includes MySQL's implicit commits before it runs the statement; `may_end`
    is the effect of what runs statements that are not in its text, or several.
    """

    READS = "reads"
    WRITES = "writes"
    ENDS = "ends"
    MAY_END = "may_end"
    BEGINS_SAVEPOINT = "begins_savepoint"
    ROLLS_BACK_TO_SAVEPOINT = "rolls_back_to_savepoint"
    RELEASES_SAVEPOINT = "releases_savepoint"


@dataclass(frozen=True, slots=True)
class TransactionEffect:
    """The effect, and the savepoint's name if any (both servers compare such names without case)."""

    effect: Effect
    savepoint: str = ""


READS: Final = TransactionEffect(Effect.READS)
WRITES: Final = TransactionEffect(Effect.WRITES)
ENDS: Final = TransactionEffect(Effect.ENDS)
MAY_END: Final = TransactionEffect(Effect.MAY_END)

# Comments, and the opening of MySQL's executable ones (/*! ... */), whose text the server runs.
_LEADING: Final = re.compile(r"(?:[\s;(]+|/\*(?!M?!).*?\*/|/\*M?!\d*|--(?:\s[^\n]*|$)|#[^\n]*)*", re.DOTALL)
_SAVEPOINT: Final = re.compile(
    r"(?P<begins>SAVEPOINT)\s+(?P<begun>[^\s;]+)"
    r"|ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO\s+(?:SAVEPOINT\s+)?(?P<undone>[^\s;]+)"
    r"|RELEASE\s+(?:SAVEPOINT\s+)?(?P<released>[^\s;]+)",
    re.IGNORECASE,
)
_ENDS_EVERYWHERE: Final = re.compile(r"(?:COMMIT|ROLLBACK|BEGIN|END)\b", re.IGNORECASE)
# What a semicolon may stand in without ending a statement.
_QUOTED: Final = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|/\*(?!M?!).*?\*/|--\s[^\n]*|#[^\n]*", re.DOTALL
)
_FURTHER_STATEMENT: Final = re.compile(r";\s*[^\s;]")
_READS: Final = re.compile(
    r"(?:SELECT|SHOW|EXPLAIN|DESC|DESCRIBE|SET|USE|PRAGMA|VALUES|TABLE|HELP|DO|XA)\b", re.IGNORECASE
)
# https://mariadb.com/kb/en/set-statement/: what follows is the statement.
_SET_STATEMENT: Final = re.compile(r"SET\s+STATEMENT\b.*?\bFOR\s+", re.IGNORECASE | re.DOTALL)
_WITH: Final = re.compile(r"WITH\b", re.IGNORECASE)
_WRITES_BEHIND_WITH: Final = re.compile(r"\b(?:INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)

# A name may follow the first word, or a second word; both are without values, and an argument is not.
_FIRST_WORDS: Final = re.compile(r"BEGIN\s+NOT\s+ATOMIC\b|[A-Z]+(?:\s+(?:`[^`]*`|[A-Z_@$][\w.@$]*))?", re.IGNORECASE)

_BY_FIRST_WORD: Final = {"SELECT ": READS, "INSERT ": WRITES, "UPDATE ": WRITES, "DELETE ": WRITES}
"""The first words of nearly all statements: looked up before any pattern is matched."""


def transaction_effect(statement: str, dialect: Dialect) -> TransactionEffect:
    """Returns the statement's effect, from its first words; of several in one, where a driver sends them, `may_end`. Of
    a database that is not ours, what ends a transaction on each.
    """
    common_effect = _BY_FIRST_WORD.get(statement[:7].upper())
    if common_effect is not None and ";" not in statement:
        return common_effect
    start, database = _start(statement), known_database(dialect)
    savepoint = _SAVEPOINT.match(statement, start)
    if savepoint is not None:
        return _savepoint_effect(savepoint)
    if database is not None and _matches(database.may_end_transaction, statement, start):
        return MAY_END
    if _ENDS_EVERYWHERE.match(statement, start):
        return ENDS
    if database is not None and _matches(database.ends_transaction, statement, start):
        return ENDS
    if database is not None and database.runs_several_statements and _is_several(statement, start):
        return MAY_END
    if _READS.match(statement, start):
        return READS
    if _WITH.match(statement, start) and not _WRITES_BEHIND_WITH.search(statement, start):
        return READS
    return WRITES


def first_words(statement: str) -> str:
    """Returns the statement's first words for an error message, without any values."""
    words = _FIRST_WORDS.match(statement, _start(statement))
    return "" if words is None else " ".join(words[0].split())


def _matches(pattern: re.Pattern[str] | None, statement: str, start: int) -> bool:
    return pattern is not None and pattern.match(statement, start) is not None


def _is_several(statement: str, start: int) -> bool:
    return ";" in statement and _FURTHER_STATEMENT.search(_QUOTED.sub("", statement[start:])) is not None


def _start(statement: str) -> int:
    """Returns where the statement itself begins, behind comments and MariaDB's settings for it."""
    start = _leading_end(statement)
    settings = _SET_STATEMENT.match(statement, start)
    return start if settings is None else settings.end() + _leading_end(statement[settings.end() :])


def _leading_end(statement: str) -> int:
    leading = _LEADING.match(statement)
    return 0 if leading is None else leading.end()


def _savepoint_effect(matched: re.Match[str]) -> TransactionEffect:
    if matched["begins"]:
        return TransactionEffect(Effect.BEGINS_SAVEPOINT, _plain_name(matched["begun"]))
    if matched["undone"]:
        return TransactionEffect(Effect.ROLLS_BACK_TO_SAVEPOINT, _plain_name(matched["undone"]))
    return TransactionEffect(Effect.RELEASES_SAVEPOINT, _plain_name(matched["released"]))


def _plain_name(quoted: str) -> str:
    return quoted.strip("`\"'[]").casefold()
