"""Makes the archive of Spark's classes that tests/fixtures/spark_classes.py names. Run as a module.

It has the classes that a run over every fault loads.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from spark_reconcile import run
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.load.spark_session import Size, spark_session
from tests.fixtures.databases import sqlite_database
from tests.fixtures.spark_classes import class_archive
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, SETTINGS, World

END_SECONDS_MAX = 300


def make(archive: Path) -> None:
    """Replace whatever other archives are in this folder. Raises FileNotFoundError where Java wrote none."""
    archive.parent.mkdir(exist_ok=True)
    for other in archive.parent.iterdir():
        with suppress(FileNotFoundError):  # another process makes one, too
            other.unlink()
    made = archive.with_suffix(f".{os.getpid()}")
    # A thousand lines would say which classes cannot be in an archive: generated ones, and those of signed jars.
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={made} -Xlog:disable"
    with tempfile.TemporaryDirectory() as folder:
        _reconcile(Path(folder))
        _end_java()
    made.replace(archive)


def _reconcile(folder: Path) -> None:
    database = sqlite_database(folder)
    world = World()
    world.groups()
    world.settled(age_ms=2 * HOUR_MS)
    plant_all(world)
    world.write(database, folder)
    config = folder / "reconcile.toml"
    config.write_text(SETTINGS.format(url=database.url))
    settings = settings_of(read_config(config), folder=folder)
    with spark_session("local[2]", log=folder / "spark.log", size=Size.SMALL) as session:
        run(settings, session=session, now_ms=NOW_MS)


def _end_java() -> None:
    """Java writes the archive as it ends, which is when its standard input does."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(END_SECONDS_MAX)


def main() -> int:
    """Make it where it is missing."""
    archive = class_archive()
    if archive is None:
        print("Spark or Java is missing", file=sys.stderr)
        return 1
    if not archive.exists():
        os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
        make(archive)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
