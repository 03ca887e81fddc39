"""Writes results.tar.xz, the output folder of a reconciliation by the hour as today's code leaves it, with its summary.

Run as `python -m tests.golden.make_results`; it starts Spark.

Only for a format that is changed on purpose before the first release. Afterwards the archive stays as it is, and a
new format gets an archive of its own beside it.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from spark_reconcile import run_windows
from tests.fixtures.databases import sqlite_database
from tests.golden.make_broker_folder import anonymous
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, NOW_MS, World, no_wait

ARCHIVE: Final = Path(__file__).parent / "results.tar.xz"
SUMMARY: Final = Path(__file__).parent / "results.json"
"""What the run said, and what reports of its stored results say."""
SINCE_MS: Final = NOW_MS - 5 * HOUR_MS
CACHES: Final = {"digests", "segments"}
"""Folders that a run makes anew where they are not of its format."""
KEPT: Final = {".json", ".parquet"}
"""Not the page, which is made anew from the rest, nor logs and Spark's checksums of files."""


def main() -> None:
    """Reconcile a world with every kind of fault by the hour, and keep what the run leaves."""
    world = World()
    world.groups()
    for number in range(20):
        world.settled(age_ms=4 * HOUR_MS - number * HOUR_MS // 10)
    plant_all(world)
    with_timed_ids(world)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = world.write(sqlite_database(folder), folder)
        summary = run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, pause=no_wait)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(settings.output.rglob("*")):
                name = path.relative_to(settings.output)
                if path.is_file() and name.parts[0] not in CACHES and path.suffix in KEPT:
                    archive.add(path, arcname=Path("results") / name, filter=anonymous)
    SUMMARY.write_text(json.dumps(said(summary.as_dict()), indent=1) + "\n")


def said(summary: dict[str, Any]) -> dict[str, Any]:
    """What a summary says, but for where it stands and how long it took."""
    whole: dict[str, Any] = json.loads(json.dumps(summary))
    return {name: value for name, value in whole.items() if name not in {"folder", "inputs", "took_seconds"}}


if __name__ == "__main__":
    main()
