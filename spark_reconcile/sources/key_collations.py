"""Says which keys are equal: by the collation of a rule's key column, of which its database is asked, or by Spark's.

A collation may ignore case, accents and trailing blanks, and take ß for ss, a ligature for its letters, and both
Unicode forms of a letter for one. Which it does, only the database knows. No row of the business's table is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from spark_reconcile.core.settings import BusinessRule, Settings
from spark_reconcile.sources.dbapi_reader import DbApiReader, Place, reading

KEYS_A_QUERY: Final = 200
"""So many keys of rows are compared with so many of messages by one statement: each with each."""
OF_SPARK: Final = "UTF8_LCASE_RTRIM"
"""Spark's name of the comparison that ignores case and trailing blanks: of keys that no collation compares."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)
Pair = tuple[str, str]
"""The key of a row, and that of a message."""


def equal_keys(
    settings: Settings, topic: str, *, of_rows: Sequence[str], of_messages: Sequence[str]
) -> dict[Pair, str]:
    """Returns the pairs that the key column of a rule on this topic has for equal, with the collation's name. Raises
    DatabaseUnavailable, and ConfigurationError where access is denied.
    """
    pairs: dict[Pair, str] = {}
    for rule in settings.rules:
        if rule.topic == topic:
            for url in settings.urls_of(rule):
                pairs |= _equal_in(Place.of(url), rule, of_rows, of_messages)
    return pairs


def _equal_in(place: Place, rule: BusinessRule, of_rows: Sequence[str], of_messages: Sequence[str]) -> dict[Pair, str]:
    schema, _, table = rule.table.rpartition(".")
    if rule.key_format is not None or place.backend.collation_query(table, rule.key_column, schema or None) is None:
        return _folded_alike(of_rows, of_messages)
    with reading(place) as reader:
        charset, collation = reader.collation(table, rule.key_column, schema=schema or None)
        if _NAME.fullmatch(charset) and _NAME.fullmatch(collation):
            # Where it calls two keys different, they are of two rows, and their message is lost.
            return _collated_alike(reader, charset, collation, of_rows=of_rows, of_messages=of_messages)
    return _folded_alike(of_rows, of_messages)  # a number, or bytes: its text has no collation


def _collated_alike(
    reader: DbApiReader, charset: str, collation: str, *, of_rows: Sequence[str], of_messages: Sequence[str]
) -> dict[Pair, str]:
    pairs: dict[Pair, str] = {}
    for rows in _chunks(of_rows):
        for messages in _chunks(of_messages):
            left, right = (" UNION ALL ".join(["SELECT ? AS k"] * len(keys)) for keys in (rows, messages))
            row, message = (
                reader.place.backend.collated(f"{side}.k", charset=charset, collation=collation) for side in "rm"
            )
            # The names are the catalog's, the values are bound.
            sql = f"SELECT r.k, m.k FROM ({left}) AS r JOIN ({right}) AS m ON {row} = {message}"  # noqa: S608
            pairs |= {
                (str(row_key), str(message_key)): collation
                for row_key, message_key in reader.rows(sql, [*rows, *messages])
            }
    return pairs


def _folded_alike(of_rows: Sequence[str], of_messages: Sequence[str]) -> dict[Pair, str]:
    messages: dict[str, list[str]] = {}
    for key in of_messages:
        messages.setdefault(_folded(key), []).append(key)
    return {(row, key): OF_SPARK for row in of_rows for key in messages.get(_folded(row), ())}


def _folded(key: str) -> str:
    return key.rstrip(" ").lower()


def _chunks(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[start : start + KEYS_A_QUERY] for start in range(0, len(keys), KEYS_A_QUERY)]
