"""Which keys a database calls equal: its own collation is asked, about keys that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from spark_reconcile import BusinessRule, Settings
from spark_reconcile.classify.key_spelling_differences import KEYS_A_QUERY, OF_SPARK, equal_keys
from spark_reconcile.core.settings import KeyFormat
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import PAID

COMPOSED, DECOMPOSED = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"
ROWS = ["Muller", "strasse", COMPOSED, "final", "Upper", "other", "plain"]
MESSAGES = [
    "M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller", "STRA\N{LATIN SMALL LETTER SHARP S}E", DECOMPOSED,
    "\N{LATIN SMALL LIGATURE FI}nal", "UPPER", "plain?",
]  # fmt: skip
EQUAL = set(zip(ROWS[:5], MESSAGES[:5], strict=True))
FOLDED = {("Upper", "UPPER")}


@pytest.mark.parametrize(
    ("column", "equal"),
    [
        ("VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci", EQUAL),
        ("VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", set()),
        ("BIGINT", FOLDED),
    ],
    ids=["accents are ignored", "bytes", "a number, whose text has no collation"],
)
def test_the_collation_of_the_column_says_which_keys_are_equal(
    mysql_like: Database, tmp_path: Path, column: str, equal: set[tuple[str, str]]
) -> None:
    settings = _settings(mysql_like, tmp_path, column)
    # More than one statement compares.
    filling = [f"key-{number}" for number in range(KEYS_A_QUERY)]

    found = equal_keys(
        settings, PAID, of_rows=[*filling, *ROWS], of_messages=[*(f"x{one}" for one in filling), *MESSAGES]
    )

    assert set(found) == equal
    assert set(found.values()) == ({OF_SPARK} if equal == FOLDED else {"utf8mb4_unicode_ci"} if equal else set())


def test_of_formatted_keys_and_in_sqlite_spark_says_which_keys_are_equal_and_of_another_topic_none_is(
    mysql_like: Database, sqlite: Database, tmp_path: Path
) -> None:
    settings = _settings(mysql_like, tmp_path, "VARCHAR(64)")
    formatted = replace(settings, rules=[replace(settings.rules[0], key_format=KeyFormat.UUID)])
    elsewhere = replace(settings, database_url=sqlite.url)

    for given, topic, equal in (
        (settings, "another", set()), (formatted, PAID, {("A", "a "), ("B ", "b")}),
        (elsewhere, PAID, {("A", "a "), ("B ", "b")}),
    ):  # fmt: skip
        found = equal_keys(given, topic, of_rows=["A", "B ", "c"], of_messages=["a ", "b", "c."])
        assert found == dict.fromkeys(equal, OF_SPARK)


def _settings(database: Database, folder: Path, column: str) -> Settings:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE bookings (code {column}, at BIGINT)"))
    engine.dispose()
    rule = BusinessRule(name="r", table="bookings", key_column="code", time_column="at", topic=PAID)
    return Settings(database_url=database.url, broker_data=folder, output=folder / "out", rules=[rule])
