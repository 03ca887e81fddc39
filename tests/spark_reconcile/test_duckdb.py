"""DuckDB as the oracle: on records with planted faults it finds by plain SQL what Spark finds by digests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from benchmarks.reconcile.checking import check, found_in_windows
from benchmarks.reconcile.contest import ours
from benchmarks.reconcile.faults import changed, doubled, lost, phantom, unannounced
from benchmarks.reconcile.records import write_records
from spark_reconcile.results.window_store import WindowStore
from spark_reconcile.results.window_totals import verdict_counts_of
from spark_reconcile.rules.verdict_rule import Scope

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES, FAULTS = 8_000, 30
KINDS = (lost, phantom, changed, doubled, unannounced)
"""Those for which plain SQL needs no table of rules."""
ECHO = "message_"
"""Begins what a business row is told of its message."""
ORACLE = """
    select a.id, 'not_in_broker' from archive a anti join messages m using (id) union
    select m.id, 'stored_twice' from messages m group by m.id having count(*) > 1 union
    select a.id, 'body_differs' from archive a join messages m using (id) where a.body_sha256 != m.body_sha256 union
    select m.id, 'no_business_row' from messages m anti join business using (topic, message_key) union
    select b.message_key, 'no_message' from business b
    anti join archive using (topic, message_key) anti join messages using (topic, message_key)
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of records, and what was planted in them."""
    folder = tmp_path_factory.mktemp("records")
    return folder, write_records(folder, messages=MESSAGES, faults=FAULTS, kinds=KINDS)


@pytest.mark.spark
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["digests", "every row"])
def test_spark_finds_what_duckdb_finds_and_what_was_planted(
    spark: SparkSession, planted: tuple[Path, dict[str, Any]], tmp_path: Path, full: bool
) -> None:
    records, wanted = planted

    judged = ours(spark, records, tmp_path, full=full)
    found = found_in_windows(tmp_path)

    assert len(judged) == 1
    assert check(wanted, found) >= sum(wanted["kinds"].values()) == FAULTS
    assert {(what, rule) for _, what, _, rule in found if not rule.startswith(ECHO)} == _oracle(records)
    assert _counted(tmp_path) == _oracle_counts(records)
    looked_at = sum(window.result["looked_at"] for window in WindowStore(tmp_path).windows.values())
    assert full or looked_at <= 2 * FAULTS, "what agrees key by key is settled, whatever stands beside it"


def _counted(output: Path) -> tuple[int, int]:
    """How many messages and business rows have a verdict, in bulk or each by itself."""
    verdict_counts = verdict_counts_of(window.result for window in WindowStore(output).windows.values())
    counts = [
        sum(one.count for one in verdict_counts if one.scope is scope) for scope in (Scope.MESSAGE, Scope.BUSINESS)
    ]
    return counts[0], counts[1]


def _oracle_counts(folder: Path) -> tuple[int, int]:
    ids = "select id from archive union select id from messages"
    with duckdb.connect() as duck:
        for name in ("business", "archive", "messages"):
            duck.execute(f"create view {name} as select * from read_parquet('{folder / name}/*/*.parquet')")
        return duck.sql(f"select (select count(*) from ({ids})), (select count(*) from business)").fetchall()[0]


def _oracle(folder: Path) -> set[tuple[str, str]]:
    with duckdb.connect() as duck:
        for name in ("business", "archive", "messages"):
            duck.execute(f"create view {name} as select * from read_parquet('{folder / name}/*/*.parquet')")
        return {(str(one), str(rule)) for one, rule in duck.execute(ORACLE).fetchall()}
