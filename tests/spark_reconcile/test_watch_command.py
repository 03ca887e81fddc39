"""`outbox reconcile watch` as its user has it: what it is started with, what ends it, and what it gets over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.cli.run_command import app
from tests.fixtures.databases import Database
from tests.outbox_broker.message_log import message_segments
from tests.spark_reconcile.world import HOUR_MS, World

LOOKS_MAX = 60_000
END_SECONDS_MAX = 300


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--every", "0h"], "--every 0h leaves no time between two runs"),
        (["--every", "hourly"], "'hourly' is no length of time"),
        (["--lookback", "2 days"], "'2 days' is no length of time"),
    ],
)
def test_lengths_that_make_no_schedule_are_refused(tmp_path: Path, options: list[str], told: str) -> None:
    sources = ["--url", f"sqlite:///{tmp_path / 'none.db'}", "--broker-data", str(tmp_path)]

    ended = CliRunner().invoke(app, ["watch", *sources, *options])

    assert isinstance(ended.exception, ConfigurationError)
    assert told in str(ended.exception)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sent", "statuses"), [(signal.SIGTERM, {0}), (signal.SIGINT, {0, 130})], ids=["SIGTERM", "SIGINT"]
)
def test_a_source_that_is_missing_is_told_and_waited_for_until_a_signal_comes(
    sqlite: Database, tmp_path: Path, sent: signal.Signals, statuses: set[int]
) -> None:
    World().write(sqlite, tmp_path)
    _first_segment(tmp_path).write_bytes(b"no segment of a broker, though of the length of its header" * 2)

    with _watching(sqlite, tmp_path, "--every", "1s") as watching:
        watching.wait_for(lambda: watching.errors().count("reconciliation_failed") >= 2)
        status = watching.end(sent)

    assert status in statuses, "an interrupt may come between two runs, or within one"
    assert "no segment of this format" in watching.errors()
    assert "Traceback" not in watching.errors()
    assert watching.output() == ""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.processes
def test_it_goes_on_once_a_source_is_there_and_judges_the_newest_hour_that_is_over(
    sqlite: Database, tmp_path: Path
) -> None:
    World().write(sqlite, tmp_path)
    segment = _first_segment(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(b"no segment of a broker, though of the length of its header" * 2)

    # A lookback of a minute has no hour that is over, but in the first minutes of one.
    scraped = tmp_path / "textfile" / "recon.prom"
    options = ("--every", "5s", "--lookback", "1m", "--metrics-file", str(scraped))
    with _watching(sqlite, tmp_path, *options) as watching:
        watching.wait_for(lambda: "reconciliation_failed" in watching.errors())
        segment.write_bytes(whole)
        watching.wait_for(lambda: "Balanced" in watching.output())
        status = watching.end(signal.SIGTERM)

    assert status == 0
    assert watching.output().startswith("Balanced: all of 0 messages")
    folder = tmp_path / "reconciliation"
    assert re.search(r"^recon_balanced 1$", scraped.read_text(), re.MULTILINE)
    assert (folder / "recon.prom").exists()
    shown = [int(start) for start in json.loads((folder / "windows.json").read_text())["windows"]]
    assert {start % HOUR_MS for start in shown} == {0}
    assert max(shown) - min(shown) == (len(shown) - 1) * HOUR_MS, "one hour, or the next one, too"


class _Watching:
    """The command in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder

    def output(self) -> str:
        """What it has written to standard output."""
        return (self._folder / "output").read_text()

    def errors(self) -> str:
        """What it has written to standard error."""
        return (self._folder / "errors").read_text()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait until something is there, as long as the process lives."""
        for _ in range(LOOKS_MAX):
            if is_there():
                return
            assert self._process.poll() is None, f"it ended: {self.errors()}"
            threading.Event().wait(0.01)
        raise AssertionError(f"it never came: {self.output()} {self.errors()}")

    def end(self, sent: signal.Signals) -> int:
        """Send a signal; returns the exit status."""
        os.kill(self._process.pid, sent)
        return self._process.wait(END_SECONDS_MAX)


@contextmanager
def _watching(database: Database, folder: Path, *options: str) -> Iterator[_Watching]:
    config = folder / "reconcile.toml"
    config.write_text(
        f'[database]\nurl = "{database.url}"\n[broker]\ndata = "broker"\n[grace]\nconfirm_after_seconds = 0\n'
    )
    command = [sys.executable, "-m", "outbox", "reconcile", "watch", "--quiet", "--config", str(config), *options]
    with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        try:
            yield _Watching(process, folder)
        finally:
            process.kill()
            process.wait()


def _first_segment(folder: Path) -> Path:
    (segment,) = message_segments(folder / "broker")
    return segment
