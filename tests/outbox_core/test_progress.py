"""Progress of long commands: lines where there is no terminal, a bar on one, objects for programs; on stderr alone."""

from __future__ import annotations

import io
import json

import pytest

from outbox_core.common.clock import ManualClock
from outbox_core.runtime.progress import Progress, ProgressForm


def test_without_a_terminal_a_line_every_two_seconds_says_how_much_and_how_long_still(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("retry", form=ProgressForm.AUTO, clock=clock, steady=True) as progress:
        for done in range(0, 10_001, 100):
            progress.update(done, 10_000, note="2 refused" if done else "")
            clock.advance(100)

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "retry: 0 of 10,000 (0 %)",
        "retry: 2,000 of 10,000 (20 %); 2 refused; 8 s left",
        "retry: 4,000 of 10,000 (40 %); 2 refused; 6 s left",
        "retry: 6,000 of 10,000 (60 %); 2 refused; 4 s left",
        "retry: 8,000 of 10,000 (80 %); 2 refused; 2 s left",
    ]


def test_shares_of_the_work_are_told_as_a_percentage_and_a_new_step_at_once(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("reconcile", form=ProgressForm.AUTO, clock=clock, steady=True, shares=True) as progress:
        for done, step in ((0, "reading"), (200, "reading"), (400, "judging"), (400, "judging"), (900, "judging")):
            progress.update(done, 1_000, step=step)
            clock.advance(1_000)

    assert capsys.readouterr().err.splitlines() == [
        "reconcile: 0 %; reading",
        "reconcile: 40 %; judging; 3 s left",
        "reconcile: 90 %; judging; 1 s left",
    ]


def test_a_program_is_told_each_step(clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reconcile", form=ProgressForm.JSON, clock=clock, shares=True) as progress:
        for step in ("reading", "reading", "judging"):
            progress.update(1, 10, step=step, figures={"tasks": 3})

    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first == {"operation": "reconcile", "done": 1, "total": 10, "left_ms": None, "step": "reading", "tasks": 3}
    assert second["step"] == "judging"


@pytest.mark.parametrize("form", ProgressForm)
def test_it_is_shown_in_a_file_where_one_is_given(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], form: ProgressForm
) -> None:
    with io.StringIO() as file, Progress("drain", form=form, clock=clock, file=file) as progress:
        progress.update(1, 4)

        assert not progress.is_terminal
        assert "drain" in file.getvalue()
    assert capsys.readouterr() == ("", "")


def test_a_line_for_people_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("book", form=ProgressForm.AUTO) as progress:
        progress.tell("[b]a worker was killed " + "and started again " * 20)

    assert capsys.readouterr().err == "[b]a worker was killed " + "and started again " * 20 + "\n"


def test_what_is_done_at_once_says_nothing(clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("retry", form=ProgressForm.AUTO, clock=clock) as progress:
        progress.update(3, 3)

    assert capsys.readouterr() == ("", "")


def test_a_program_gets_an_object_a_line_from_the_first_state_to_the_last(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    def drain() -> None:
        with Progress("drain", form=ProgressForm.JSON, clock=clock) as progress:
            for done in range(5):
                progress.update(done, 10, left_ms=7 - done, figures={"ready": 10 - done})
                clock.advance(700)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        drain()

    said = capsys.readouterr()
    objects = [json.loads(line) for line in said.err.splitlines()]
    assert said.out == ""
    assert [(one["done"], one["left_ms"], one["ready"]) for one in objects] == [(0, 7, 10), (3, 4, 7), (4, 3, 6)]
    assert all((one["operation"], one["total"]) == ("drain", 10) for one in objects)


def test_a_state_that_was_shown_is_not_shown_again_at_the_end(
    clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("drain", form=ProgressForm.JSON, clock=clock) as progress:
        progress.update(0, 0)

    assert json.loads(capsys.readouterr().err) == {"operation": "drain", "done": 0, "total": 0, "left_ms": None}


@pytest.mark.parametrize(
    ("left_ms", "text"),
    [(1, "1 s"), (59_000, "59 s"), (61_000, "1 min 1 s"), (3_600_000, "1 h 0 min"), (90_000_000, "25 h 0 min")],
)
def test_the_time_left_is_told_in_two_units(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], left_ms: int, text: str
) -> None:
    with Progress("redrive", form=ProgressForm.AUTO, clock=clock) as progress:
        progress.update(1, 4, left_ms=left_ms)

    assert capsys.readouterr().err == f"redrive: 1 of 4 (25 %); {text} left\n"


def test_on_a_terminal_shares_are_a_bar_with_a_percentage(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    with Progress("reconcile", form=ProgressForm.AUTO, clock=clock, shares=True) as progress:
        progress.update(420, 1_000, step="reading", left_ms=3_000)

    said = capsys.readouterr().err
    assert "42%" in said
    assert "420" not in said
    assert "reading; 3 s left" in said


def test_on_a_terminal_there_is_a_bar(
    clock: ManualClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    with Progress("redrive", form=ProgressForm.AUTO, clock=clock) as progress:
        progress.update(1, 4, note="[b]3 wait", left_ms=3_000)
        progress.update(2, 4, note="[b]2 wait", left_ms=2_000)

    said = capsys.readouterr()
    assert said.out == ""
    assert "redrive" in said.err
    assert "2/4" in said.err
    assert "[b]2 wait; 2 s left" in said.err
