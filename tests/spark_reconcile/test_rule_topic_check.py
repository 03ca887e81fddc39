"""A rule whose topic was misspelt is refused with the right one, before thousands of rows are called lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Settings, run, run_windows
from spark_reconcile.core.plausible_times import InputCount
from spark_reconcile.load.name_checks import check_rule_topics, note_on_topic
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MISSPELT = "order.payd"


@pytest.mark.spark
@pytest.mark.parametrize("hourly", [False, True])
def test_a_run_with_a_misspelt_topic_publishes_nothing_and_names_the_right_one(
    sqlite: Database, tmp_path: Path, spark: SparkSession, *, hourly: bool
) -> None:
    settings = _misspelt(sqlite, tmp_path)

    judge = partial(run_windows, since_ms=NOW_MS - 2 * HOUR_MS) if hourly else run
    with pytest.raises(ConfigurationError, match=r"3 rows ask for .* 'order.payd', .* did you mean 'order.paid'"):
        judge(settings, now_ms=NOW_MS, session=spark, pause=no_wait)

    assert not (settings.output / "manifest.json").exists()


def test_only_a_topic_that_nothing_was_ever_on_and_that_is_nearly_another_one_is_refused(
    sqlite: Database, tmp_path: Path
) -> None:
    settings = _misspelt(sqlite, tmp_path)
    rows, message = _count("business", MISSPELT, "0"), _count("messages", PAID)
    both = replace(settings, rules=[*settings.rules, replace(settings.rules[0], name="right", topic=PAID)])

    with pytest.raises(ConfigurationError, match="did you mean"):
        check_rule_topics(settings, [rows, message], now_ms=NOW_MS)
    for counts in (
        [rows, message, _count("messages", MISSPELT)],
        [rows, message, _count("actions", MISSPELT, "declared mail")],
        [rows, message, _count("outbox", MISSPELT, "pending")],
        [rows, _count("messages", "newsletter")],
        [rows],
        [message],
        [replace(rows, first_ms=NOW_MS - 1_000), message],
    ):
        check_rule_topics(settings, counts, now_ms=NOW_MS)
    check_rule_topics(both, [rows, message], now_ms=NOW_MS)


def test_a_topic_that_nothing_was_ever_on_is_named_beside_its_rule(sqlite: Database, tmp_path: Path) -> None:
    settings = _misspelt(sqlite, tmp_path)
    rows = _count("business", MISSPELT, "0")

    assert "'order.payd'" in note_on_topic(settings, [rows, _count("messages", "newsletter")], 0)
    assert note_on_topic(settings, [rows, _count("archive", MISSPELT, "stored")], 0) == ""
    assert note_on_topic(settings, [replace(rows, rows=0)], 0) == ""


def _misspelt(database: Database, folder: Path) -> Settings:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled()
    settings = world.write(database, folder)
    return replace(settings, rules=[replace(settings.rules[0], topic=MISSPELT)])


def _count(input_kind: str, topic: str, note: str = "") -> InputCount:
    return InputCount(
        input_kind=input_kind, topic=topic, note=note, rows=3, first_ms=NOW_MS - HOUR_MS, last_ms=NOW_MS - HOUR_MS
    )
