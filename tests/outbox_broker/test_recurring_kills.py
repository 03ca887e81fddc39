"""Whatever ends the broker, each occurrence of a recurring message comes, and comes once."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.messages.recurring_message import occurrence_id
from tests.fixtures.fork_server import fork_server
from tests.outbox_broker.killed_engine import START_MS, copy_at_each_call
from tests.outbox_broker.killed_recurring import MINUTE_MS, NAME, OPTIONS, TOPIC, recurring_run
from tests.outbox_broker.polling import until

ROOT = Path(__file__).parents[2]


def told_in(data: bytes) -> list[dict[str, Any]]:
    """What whole lines tell; the last one may be cut short by the kill."""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def check_recovered(folder: Path, told: list[dict[str, Any]], *, first_ms: int = START_MS) -> None:
    """Open what the dead broker left at the time of its death: each minute has its message, and one alone."""
    now_ms = max([line["now_ms"] for line in told if "now_ms" in line], default=first_ms)
    with closing(Engine.open(folder, clock=ManualClock(now_ms), options=OPTIONS)) as engine:
        if NAME not in engine.recurring.names():
            assert not told
            return
        added_ms = engine.recurring.view(NAME).added_at_ms
        until(lambda: engine.recurring.view(NAME).fired_to_ms == now_ms or now_ms == added_ms)
        came = [one.id for one in engine.puller.pull(TOPIC, f"audit-{now_ms}", max_messages=1_000)]

    wanted = range(added_ms + MINUTE_MS, now_ms + 1, MINUTE_MS)
    assert came == [occurrence_id(NAME, generation=1, at_ms=at_ms) for at_ms in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before", "half", "power"])
def test_whatever_storage_call_is_the_last_each_occurrence_comes_once(tmp_path: Path, way: str) -> None:
    copy_at_each_call(recurring_run, tmp_path, way=way)

    calls = sorted(int(path.stem) for path in tmp_path.glob("*.told"))
    for call in calls:
        print(f"call {call}")
        check_recovered(tmp_path / str(call), told_in((tmp_path / f"{call}.told").read_bytes()))
    assert len(calls) > 40


@pytest.mark.processes
def test_a_broker_that_is_killed_again_and_again_brings_each_occurrence_once(tmp_path: Path, random_seed: int) -> None:
    random = Random(random_seed)
    told: list[dict[str, Any]] = []
    for _ in range(3):
        start_ms = max([line["now_ms"] for line in told if "now_ms" in line], default=START_MS)
        process = fork_server().start(
            "tests.outbox_broker.killed_recurring", str(tmp_path / "data"), str(start_ms),
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        with closing(process):
            assert process.stdout is not None
            lines = b"".join(process.stdout.readline() for _ in range(random.randint(2, 30)))
            process.kill()
            told += told_in(lines + process.stdout.read())
        assert process.returncode == -9
        check_recovered(tmp_path / "data", told)
