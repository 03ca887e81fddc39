"""Finds business rows and messages whose keys differ only in their spelling, among the findings alone.

Spark compares keys byte by byte; a database may call more keys equal: MySQL's default collations those that differ in
case or in accents. So the code that published the message may have seen one key where Spark reads two. Without this the
row would be lost, and its message a phantom. The collation of the rows' own column says which keys are one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.classification import overruled, rule_named
from spark_reconcile.core.dataframes import listed
from spark_reconcile.core.settings import BusinessRule, Settings
from spark_reconcile.rules.business_row_rules import BUSINESS_ROW_RULES
from spark_reconcile.rules.message_rules import MESSAGE_RULES
from spark_reconcile.rules.verdict_rule import Scope, VerdictRule
from spark_reconcile.sources.dbapi_reader import DatabaseAddress, DbApiReader, reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_UNASKED: Final = f"scope = '{Scope.MESSAGE}' and rule = 'no_business_row' and message_key is not null"
_UNANSWERED: Final = "rule in ('no_message', 'too_few_messages')"
KEYS_MAX: Final = 2_000
"""Of up to so many rows and messages, the keys are compared by the database; of more, by Spark's OF_SPARK."""
EqualKeys = Callable[[str, Sequence[str], Sequence[str]], Mapping[tuple[str, str], str]]
"""Given a topic, keys of rows and keys of messages, returns those pairs that are equal, with the collation's name."""
_FOLDED: Final = "lower(rtrim(message_key)) as folded"
_OF_MESSAGE: Final = "key_spelling_differs"
_OF_ROW: Final = "message_key_spelling_differs"


def with_key_spelling_differences(
    table: DataFrame, business: DataFrame, *, is_few: bool, equal_keys: EqualKeys
) -> tuple[DataFrame, DataFrame]:
    """Returns both verdict tables; a phantom message and the row that requires it get the rule `key_spelling_differs`,
    and in the column `collation` the name of the collation by which their keys are equal.

    `equal_keys`: the pairs, of keys of rows and of messages on a topic, that the rows' column calls equal. Rows with
    other verdicts are not changed. Of many rows nothing is joined if either side has none.
    """
    unanswered = business.where(_UNANSWERED).selectExpr("topic", "message_key", _FOLDED)
    unasked = table.where(_UNASKED).selectExpr("message_id", "topic", "message_key", _FOLDED)
    if not is_few and (unanswered.isEmpty() or unasked.isEmpty()):
        return table, business
    keys_of_both = unanswered.selectExpr("cast(null as string) as message_id", "topic", "message_key").unionByName(
        unasked.select("message_id", "topic", "message_key")
    )
    key_rows = keys_of_both.limit(KEYS_MAX + 1).collect()
    if len(key_rows) > KEYS_MAX:
        # So many are no matter of spelling, and the database is not asked about each with each.
        pairs = unasked.join(unanswered.withColumnRenamed("message_key", "row_key"), ["topic", "folded"])
        messages, rows = (
            pairs.selectExpr(*names, f"'{OF_SPARK}' as named").distinct()
            for names in (("message_id", "topic"), ("topic", "row_key as message_key"))
        )
    else:
        matched = _matched([tuple(row) for row in key_rows], equal_keys)
        if not matched:
            return table, business
        of_messages = {(message_id, topic): named for (message_id, topic, _), named in matched.items()}
        of_rows = {(topic, row_key): named for (_, topic, row_key), named in matched.items()}
        messages, rows = (
            listed(
                table.sparkSession,
                [(*identity, named) for identity, named in sorted(named_keys.items())],
                f"{names}, named string",
            )
            for named_keys, names in (
                (of_messages, "message_id string, topic string"),
                (of_rows, "topic string, message_key string"),
            )
        )
    return (
        _renamed(table, messages, ["message_id", "topic"], rule_named(MESSAGE_RULES, _OF_MESSAGE), where=_UNASKED),
        _renamed(business, rows, ["topic", "message_key"], rule_named(BUSINESS_ROW_RULES, _OF_ROW), where=_UNANSWERED),
    )


def _matched(
    key_rows: Sequence[tuple[str | None, str, str | None]], equal_keys: EqualKeys
) -> dict[tuple[str, str, str], str]:
    """Returns the message id, the topic and the row's key of each pair that is one key, and by which collation.
    `key_rows`: of rows the first is None.
    """
    matched: dict[tuple[str, str, str], str] = {}
    for topic in {topic for _, topic, _ in key_rows}:
        here = [(message_id, key) for message_id, of, key in key_rows if of == topic and key]
        rows = sorted({key for message_id, key in here if message_id is None})
        messages: dict[str, list[str]] = {}
        for message_id, key in here:
            if message_id is not None:
                messages.setdefault(key, []).append(message_id)
        if not rows or not messages:
            continue
        for (row, key), named in sorted(equal_keys(topic, rows, sorted(messages)).items()):
            matched.update({(message_id, topic, row): named for message_id in messages[key]})
    return matched


def _renamed(frame: DataFrame, among: DataFrame, on: list[str], rule: VerdictRule, *, where: str) -> DataFrame:
    """Apply the rule to the rows that are also in `among`, and note there by which collation."""
    marked = frame.join(among, on, "left").withColumnRenamed("collation", "before")
    # The condition is on the rule that is replaced.
    noted = marked.selectExpr("*", f"if(named is not null and {where}, named, before) as collation")
    return overruled(noted, rule, where=f"named is not null and {where}").select(*frame.columns)


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
    """Returns the pairs that the key column of a rule on this topic has for equal, with the collation's name.

    A collation may ignore case, accents and trailing blanks, and take ß for ss, a ligature for its letters, and both
    Unicode forms of a letter for one. Which it does, only the database knows: it is asked, and no row of the business's
    table is read. Raises DatabaseUnavailable, and ConfigurationError where access is denied.
    """
    pairs: dict[Pair, str] = {}
    for rule in settings.rules:
        if rule.topic == topic:
            for url in settings.urls_of(rule):
                pairs |= _equal_in(DatabaseAddress.of(url), rule, of_rows, of_messages)
    return pairs


def _equal_in(
    address: DatabaseAddress, rule: BusinessRule, of_rows: Sequence[str], of_messages: Sequence[str]
) -> dict[Pair, str]:
    schema, _, table = rule.table.rpartition(".")
    if rule.key_format is not None or address.backend.collation_query(table, rule.key_column, schema or None) is None:
        return _folded_alike(of_rows, of_messages)
    with reading(address) as reader:
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
                reader.address.backend.collated(f"{side}.k", charset=charset, collation=collation) for side in "rm"
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
