"""What the demonstration tells while it runs: lines for people, objects for programs, by the words of all commands."""

from __future__ import annotations

import json

import pytest

from outbox_core.common.clock import ManualClock
from outbox_core.runtime.progress import ProgressForm
from outbox_demo.demo_progress import DemoProgress


def run_through(progress: DemoProgress, clock: ManualClock) -> None:
    """Something happens before, within and between two operations."""
    progress.say("loading")
    with progress.operation("load"):
        progress.count(0, 10)
        clock.advance(2_000)
        progress.count(5, 10)
        progress.say("a worker was killed")
    progress.say("all is loaded")
    with progress.operation("prove", steady=False, shares=True):
        progress.count(250, 1_000, left_ms=3_000, step="reading")


def test_people_get_lines_of_what_happened_and_of_how_far_it_is(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    run_through(DemoProgress(form=ProgressForm.AUTO, clock=clock), clock)

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "[   0.0 s] loading",
        "load: 0 of 10 (0 %)",
        "load: 5 of 10 (50 %); 2 s left",
        "[   2.0 s] a worker was killed",
        "[   2.0 s] all is loaded",
        "prove: 25 %; reading; 3 s left",
    ]


def test_programs_get_objects_alone(clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    run_through(DemoProgress(form=ProgressForm.JSON, clock=clock), clock)

    said = capsys.readouterr()
    assert said.out == ""
    told = [json.loads(line) for line in said.err.splitlines()]
    assert [(one["operation"], one["done"], one["total"], one.get("step")) for one in told] == [
        ("demo", 0, 4, "loading"), ("load", 0, 10, None), ("load", 5, 10, None), ("load", 5, 10, "a worker was killed"),
        ("demo", 1, 4, "all is loaded"), ("prove", 250, 1_000, "reading"),
    ]  # fmt: skip
