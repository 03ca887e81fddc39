"""The benchmark of filters runs and prints what it promises. Not what it finds: at these sizes figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
RUN_SECONDS_MAX = 1_200


@pytest.mark.processes
@pytest.mark.slow
def test_filter_compares_the_index_with_every_filter_by_itself() -> None:
    command = [sys.executable, "-m", "benchmarks.broker.filter", "--quick", "--no-peers"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for shape in ("type", "region", "amount", "mixed", "loose"):
        for figures in found["shapes"][shape]["sizes"].values():
            for traffic in ("all", "wanted"):
                assert set(figures["traffic"][traffic]["us_a_message"]) == {"indexed", "unindexed"}
    assert found["memory"]["bytes_a_subscription"] > 0
