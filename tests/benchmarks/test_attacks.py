"""The program that plays attacks on the broker prints what it promises, and refuses what it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.outbox_broker.http.attacks import ATTACKS

REPOSITORY = Path(__file__).parent.parent.parent
RUN_SECONDS_MAX = 1_200


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.broker.attacks", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)


@pytest.mark.processes
@pytest.mark.slow
def test_each_attack_has_its_memory_its_longest_probe_and_its_answers() -> None:
    done = run("--only", "tiny_receipts,unfinished_acks", "--json")

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["benchmark"] == "broker.attacks"
    assert list(found["results"]) == ["tiny_receipts", "unfinished_acks"]
    for figures in found["results"].values():
        assert figures["rss_mib"] >= 0
        assert figures["longest_probe_ms"] > 0
        assert figures["probes"] >= 1
    assert found["results"]["tiny_receipts"]["statuses"] == {"413": 1}
    assert "longest probe" in done.stderr


@pytest.mark.processes
def test_an_attack_that_is_not_known_is_refused_with_those_that_are() -> None:
    done = run("--only", "flood")

    assert done.returncode == 2
    assert all(name in done.stderr for name in ("'flood'", *ATTACKS))
