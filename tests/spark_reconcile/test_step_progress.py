"""How the steps of a run are reported: lines without a terminal, a status line on one, nothing when quiet."""

from __future__ import annotations

import io

from rich.console import Console

from spark_reconcile.cli.run_command import step_progress


class Seconds:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_each_step_is_a_line_with_the_time_since_the_start() -> None:
    seconds, written = Seconds(), io.StringIO()

    with step_progress(Console(file=written), monotonic=seconds) as begin:
        assert written.getvalue() == ""
        begin("starting Spark")
        seconds.now += 75.25
        begin("giving verdicts on 1,234 rows [of all]")

    assert written.getvalue() == "    0.0 s  starting Spark\n   75.2 s  giving verdicts on 1,234 rows [of all]\n"


def test_a_long_step_stays_one_line() -> None:
    written = io.StringIO()

    with step_progress(Console(file=written, width=20), monotonic=Seconds()) as begin:
        begin("word " * 50)

    assert written.getvalue().count("\n") == 1


def test_quiet_writes_nothing_without_a_terminal() -> None:
    written = io.StringIO()

    with step_progress(Console(file=written), monotonic=Seconds(), quiet=True) as begin:
        begin("starting Spark")

    assert written.getvalue() == ""


def test_on_a_terminal_the_step_is_in_a_status_line_and_leaves_no_line_behind() -> None:
    written = io.StringIO()

    with step_progress(Console(file=written, force_terminal=True), monotonic=Seconds()) as begin:
        begin("starting Spark")

    assert "starting Spark (0 s)" in written.getvalue()
    assert "0.0 s  starting Spark" not in written.getvalue()
