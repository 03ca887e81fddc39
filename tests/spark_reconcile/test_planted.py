"""Every kind of fault among many thousand messages of the flights, in a user's own sources: each is found, no other is.

What benchmarks.reconcile.sources writes is reconciled as its settings file says. The same with millions:
`python -m benchmarks.reconcile.contest whole` and `hourly`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.reconcile.checking import (
    PLAIN,
    check,
    found_in_run,
    found_in_windows,
    planted_in,
    rules_planted,
    wanted_of,
)
from benchmarks.reconcile.records import HOUR_MS, START_MS
from benchmarks.reconcile.sources import ALL_KINDS, write_sources
from spark_reconcile import Settings, run, run_windows
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.rules.verdict_rule import State

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 20_000
ROUNDS = 2


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources in which every kind of fault stands as often as there are rounds."""
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder, messages=MESSAGES, faults=ROUNDS * len(ALL_KINDS), segment_bytes=512 * 1024)
    return folder


@pytest.mark.spark
def test_a_whole_run_finds_every_kind_of_fault_among_thousands_at_its_id_by_its_rule_and_nothing_else(
    spark: SparkSession, sources: Path, tmp_path: Path
) -> None:
    planted = planted_in(sources)

    summary = run(_settings(sources, tmp_path), session=spark, now_ms=planted["now_ms"])

    assert check(planted, found_in_run(Path(summary.folder))) >= ROUNDS * len(ALL_KINDS)
    assert summary.unexplained == 0
    assert summary.messages >= MESSAGES - len(planted["expected"])
    assert summary.count(State.SETTLED) > 3 * (MESSAGES - len(planted["expected"]))


@pytest.mark.spark
@pytest.mark.slow
def test_a_run_by_the_hour_finds_the_same_of_the_hours_that_are_over(
    spark: SparkSession, sources: Path, tmp_path: Path
) -> None:
    planted = planted_in(sources)
    settings = _settings(sources, tmp_path)

    run_windows(settings, since_ms=START_MS, now_ms=planted["now_ms"], session=spark, pause=lambda _: None)

    last_ms = planted["now_ms"] // HOUR_MS * HOUR_MS
    assert check(planted, found_in_windows(settings.output), before_ms=last_ms) > ROUNDS * len(ALL_KINDS) / 2


def test_each_rule_is_planted_here_or_in_a_test_of_its_own(sources: Path) -> None:
    mine = {"oracle.py", "test_verdicts.py", Path(__file__).name}
    others = [path for path in Path(__file__).parent.glob("*.py") if path.name not in mine]
    named = set(re.findall(r'"(\w+)"', "".join(path.read_text() for path in others)))

    planted = planted_in(sources)
    missing = {name for (_, name), count in rules_planted(planted).items() if not count} - PLAIN

    assert set(planted["kinds"].values()) == {ROUNDS}
    assert missing <= named
    assert len(missing) < len(rules_planted(planted)) / 3


@pytest.mark.parametrize("wrong", ["missing", "too many", "another rule", "twice"])
def test_a_verdict_that_is_missing_or_wrong_or_too_many_is_refused(sources: Path, wrong: str) -> None:
    planted = planted_in(sources)
    found = wanted_of(planted)
    check(planted, found)
    first = min(one for one in found if one[1])
    match wrong:
        case "missing":
            del found[first]
        case "another rule":
            found[*first[:3], "stored_twice"] = found.pop(first)
        case "twice":
            found[first] += 1
        case _:
            found["message", "0" * 32, "", "not_in_broker"] = 1

    with pytest.raises(SystemExit, match="wrong verdicts"):
        check(planted, found)


def _settings(sources: Path, output: Path) -> Settings:
    found = settings_of(read_config(sources / "reconcile.toml"), folder=sources)
    return replace(found, output=output / "out")
