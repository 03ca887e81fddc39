"""Many suspects are looked at again part by part, with the verdicts that one look at all of them would give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from spark_reconcile import Settings, run_windows
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.recheck.suspect_rereading import Suspects, parted
from spark_reconcile.repair.plan import confirmed_suspects, hour_folders
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, PAID, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINCE_MS = NOW_MS - 5 * HOUR_MS


@pytest.mark.spark
def test_suspects_in_parts_get_the_verdicts_of_one_look_at_all(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _incident()
    settings = world.write(sqlite, tmp_path)
    discarded = world.outbox[0]

    def discard(_: float) -> None:
        world.outbox.remove(discarded)
        world.write_tables(sqlite)

    at_once = replace(settings, output=tmp_path / "at-once")
    looks = [_run(at_once, spark)]
    settings = replace(settings, limits=RunLimits(suspects_a_part=3, one_partition_rows_max=0))
    looks.append(_run(settings, spark))
    expected, found = _rows(at_once), _rows(settings)
    cleared = replace(settings, output=tmp_path / "cleared")
    looks.append(_run(cleared, spark, pause=discard))

    assert [len(parts) for parts in looks] == [1, 4, 4]
    assert found == expected
    assert Counter(rule for *_, rule, confirmed in found if confirmed) == {
        "not_sent": 5, "message_unsent": 5, "not_in_broker": 3, "message_lost": 3, "key_differs": 2,
        "message_mismatch": 2, "no_message": 1,
    }  # fmt: skip
    suspects = confirmed_suspects(hour_folders(settings.output, since_ms=SINCE_MS, until_ms=NOW_MS))
    assert Counter(one.rule for one in suspects) == {"not_sent": 5, "not_in_broker": 3}
    gone = {row for row in _rows(cleared) if discarded["id"] in row or discarded["message_key"] in row}
    assert {row[-2] for row in gone} == {"no_message"}


def test_a_key_is_in_one_part_with_all_its_messages() -> None:
    limits = RunLimits(suspects_a_part=3, suspects_max=12)
    keyed: dict[Any, list[tuple[str, str]]] = {
        (PAID, "1"): _named("ba"), (PAID, "2"): _named("cd"), (PAID, "3"): [], (PAID, "4"): _named("e"),
        (PAID, "hot"): _named("fghi"), None: _named("yx"),
    }  # fmt: skip

    assert parted(keyed, limits) == [
        Suspects(messages=_named("ab"), keys=[(PAID, "1")]),
        Suspects(messages=_named("cde"), keys=[(PAID, "2"), (PAID, "3"), (PAID, "4")]),
        Suspects(messages=_named("xy"), keys=[]),
    ]
    assert parted({**keyed, (PAID, "5"): _named("kl")}, limits) is None, "13 ids"
    assert parted({(PAID, str(number)): [] for number in range(13)}, limits) is None
    assert parted({}, limits) == []


def _named(ids: str) -> list[tuple[str, str]]:
    return [(PAID, id_) for id_ in ids]


def _incident() -> World:
    """A compensator that stood still, a broker that lost three, a row without a message, and two messages with each
    other's keys: in parts of three, the keys are in two of them.
    """
    world = World()
    world.groups()
    for _ in range(4):
        world.settled(age_ms=2 * HOUR_MS)
    for number in range(5):
        world.unsent(f"unsent-{number}", key=str(world.order(age_ms=2 * HOUR_MS)), age_ms=2 * HOUR_MS)
    world.order(age_ms=2 * HOUR_MS)
    _lost(world)
    swapped = [world.order(age_ms=2 * HOUR_MS) for _ in range(2)]
    for order, other in (swapped, swapped[::-1]):
        world.sent(f"swapped-{order}", key=str(order), age_ms=2 * HOUR_MS)
        world.store(f"swapped-{order}", key=str(other), age_ms=2 * HOUR_MS)
    for _ in range(2):
        _lost(world)
    with_timed_ids(world)
    return world


def _lost(world: World) -> None:
    order = world.order(age_ms=3 * HOUR_MS)
    world.sent(f"lost-{order}", key=str(order), age_ms=3 * HOUR_MS)


def _run(settings: Settings, spark: SparkSession, *, pause: Any = no_wait) -> list[str]:
    """Which parts were looked at again."""
    said: list[str] = []
    run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=pause, say=said.append)
    return [one for one in said if one.startswith("looking again")]


def _rows(settings: Settings) -> set[tuple[Any, ...]]:
    store, found = WindowStore(settings.output), []
    for start in store.windows:
        for name in ("verdicts", "business_verdicts"):
            folder = store.folder(start) / name
            found += pq.read_table(folder).to_pylist() if folder.exists() else []
    of = ("scope", "message_id", "consumer_group", "business_rule", "message_key", "rule", "confirmed")
    return {tuple(row.get(name) for name in of) for row in found}
