"""The benchmarks of the delay cluster run and print what they promise; these sizes are too small for figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
RUN_SECONDS_MAX = 540


def test_publishes_to_a_cluster_are_counted_and_compared_with_the_local_store(tmp_path: Path) -> None:
    found = run("publish_rates", tmp_path, "--messages", "8000", "--shards", "1,4")

    assert set(found) >= {"local", "one_ledger", "1 shard", "4 shards"}
    assert found["local"]["to_local"] == 1.0
    for shards in (1, 4):
        costs = found["1 shard" if shards == 1 else f"{shards} shards"]
        assert costs["to_local"] > 0
        assert costs["log_ledgers"]["median"] == 1_000_000 * shards / 8_000
        # Batches that come while an entry is on its way share the next one: at most an entry a batch and shard.
        assert 1_000_000 * shards / 8_000 <= costs["log_entries"]["median"]
        assert costs["log_bytes"]["median"] > 512 * 1_000_000


def test_a_takeover_is_timed_in_parts_that_make_up_the_whole(tmp_path: Path) -> None:
    found = run("takeover", tmp_path, "--pending", "4000", "--shards", "2")["seconds"]["4000"]

    parts = sum(found[part]["median"] for part in ("session", "fencing", "recovery", "first"))
    assert parts == pytest.approx(found["slowest"]["median"], abs=0.1)
    assert found["memory_mib"]["median"] > 0


def test_lateness_through_a_cluster_is_never_negative_and_stands_beside_one_process(tmp_path: Path) -> None:
    found = run("lateness", tmp_path, "--per-second", "50", "--seconds", "2", "--shards", "2")

    for kind in ("cluster", "process"):
        assert 0 <= found[kind]["min_ms"]["median"] <= found[kind]["p99_ms"]["median"]
        assert found[kind]["memory_mib"]["median"] > 0


def run(program: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a program with small sizes, and return what it prints."""
    command = [sys.executable, "-m", f"benchmarks.delay.cluster.{program}", "--folder", str(folder), "--json"]
    done = subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True,
                          timeout=RUN_SECONDS_MAX, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
