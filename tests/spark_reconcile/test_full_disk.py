"""A disk that is full ends a run with one line, and shows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.errors import OutputFailed
from tests.broker.mounts import small_disk
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
FULL = "No space left on device"


def _by_the_hour(settings: Settings, **options: Any) -> Summary:
    return run_windows(settings, since_ms=NOW_MS - 3 * HOUR_MS, pause=lambda _: None, **options)


@pytest.mark.parametrize(
    ("reconcile", "room_bytes"),
    [(run, 10_000), (_by_the_hour, 10_000), (run, 28_000)],
    ids=["tables", "hours", "the report"],
)
def test_a_full_disk_is_told_in_one_line_and_nothing_is_shown(
    spark: SparkSession, sqlite: Database, tmp_path: Path, reconcile: Callable[..., Summary], room_bytes: int
) -> None:
    world = World()
    world.groups()
    for _ in range(3):
        world.settled(age_ms=2 * HOUR_MS)
    settings = world.write(sqlite, tmp_path)

    with small_disk(tmp_path, size_mb=1) as disk:
        (disk / "filler").write_bytes(bytes((1 << 20) - room_bytes))
        output = disk / "out"
        with pytest.raises(OutputFailed, match=FULL) as told:
            reconcile(replace(settings, output=output), session=spark, now_ms=NOW_MS)
        left = sorted(path.name for path in output.iterdir() if path.name not in {"windows", "segments"})

    assert len(str(told.value).splitlines()) == 1
    assert left == [".lock"]
