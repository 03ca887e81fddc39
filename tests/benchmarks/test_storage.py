"""The comparison of storage engines runs, and each engine gives back what it was given; the table is the files'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import figures_table
from benchmarks.storage.logs import OurLog, SqliteLog
from benchmarks.storage.schedules import Due, OurSchedule, SqliteSchedule

ROOT = Path(__file__).parents[2]
NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize("kind", [OurLog, SqliteLog])
def test_a_log_gives_back_its_messages_in_order_after_it_was_closed(
    kind: type[OurLog | SqliteLog], tmp_path: Path
) -> None:
    bodies = [bytes([number]) * 100 for number in range(20)]
    log = kind(tmp_path)
    log.append(bodies[:7])
    log.append(bodies[7:])
    log.close()

    log = kind(tmp_path)
    assert list(log.read()) == bodies
    log.close()


@pytest.mark.parametrize("kind", [OurSchedule, SqliteSchedule])
def test_a_schedule_gives_what_is_due_in_order_and_nothing_that_was_canceled(
    kind: type[OurSchedule | SqliteSchedule], tmp_path: Path
) -> None:
    schedule = kind(tmp_path)
    dues = [Due(NOW_MS + 10 * (7 * number % 5), f"m{number}", b"body") for number in range(5)]
    schedule.insert(dues, now_ms=NOW_MS)

    assert schedule.cancel(["m3", "nobody"], now_ms=NOW_MS) == 1
    assert schedule.take(NOW_MS + 10) == [("m0", b"body")]
    assert schedule.take(NOW_MS + 10) == []
    assert schedule.take(NOW_MS + 100) == [("m1", b"body"), ("m4", b"body"), ("m2", b"body")]
    schedule.close()


@pytest.mark.processes
@pytest.mark.slow
def test_the_program_compares_all_four_engines(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.storage.engines",
        "--quick",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1_200)

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for part, name in (
        ("log", "append_by_100_per_second"),
        ("log", "read_per_second"),
        ("schedule", "take_per_second"),
    ):
        assert all(found[part][name][engine]["median"] > 0 for engine in ("ours", "rocksdb", "lmdb", "sqlite"))
        assert set(found[part][name]["to_ours"]) == {"rocksdb", "lmdb", "sqlite"}


def test_the_table_of_figures_is_that_of_the_programs_output() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    written = page.partition(figures_table.BEGIN)[2].partition(figures_table.END)[0]

    assert written.strip() == figures_table.table(ROOT / "benchmarks" / "figures").strip()
    assert written.count("storage.engines") > 5


def test_an_output_of_quick_sizes_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "claim.json").write_text(json.dumps({"benchmark": "claim", "options": {"quick": True}}))

    with pytest.raises(ValueError, match="not the whole output"):
        figures_table.table(tmp_path)
