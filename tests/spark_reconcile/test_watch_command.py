"""`outbox reconcile watch` as its user has it: what it is started with, what ends it, and what it gets over."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.cli.run_command import app


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
