"""A disk that is full ends a run with one line, and shows nothing of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile import run
from spark_reconcile.core.errors import OutputFailed
from tests.fixtures.databases import Database
from tests.outbox_broker.mounts import small_disk
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
FULL = "No space left on device"


@pytest.mark.parametrize("room_bytes", [10_000, 28_000], ids=["the tables", "the report"])
def test_a_full_disk_is_told_in_one_line_and_nothing_is_shown(
    spark: SparkSession, sqlite: Database, tmp_path: Path, room_bytes: int
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
            run(replace(settings, output=output), session=spark, now_ms=NOW_MS)
        left = sorted(path.name for path in output.iterdir() if path.name not in {"windows", "segments"})

    assert len(str(told.value).splitlines()) == 1
    assert left == [".lock"]
