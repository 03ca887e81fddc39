"""What `outbox status --broker http://...` shows of our own broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outbox.cli import status_command
from outbox.migrate import upgrade
from outbox_broker.engine.engine import Engine
from tests.broker_adapter.servers import served, serving
from tests.fixtures.databases import Database

Status = Callable[..., Result]


@pytest.fixture
def status(sqlite: Database) -> Status:
    """The command, with these options."""
    upgrade(sqlite.url)
    return lambda *options: CliRunner().invoke(status_command.app, ["--url", sqlite.url, *options])


def test_a_broker_that_serves_is_named_and_one_that_is_down_is_a_reason_to_act(tmp_path: Path, status: Status) -> None:
    with served(tmp_path / "broker") as server:
        url = server.url
        up = status("--broker", url)
    down, down_json = status("--broker", url), status("--broker", url, "--json")

    assert (up.exit_code, down.exit_code, down_json.exit_code) == (0, 1, 1), up.output
    assert f"broker: outbox-mq {version('outbox-mq')}" in up.output.splitlines()
    assert url.removeprefix("http://") in down.output
    [weakness] = json.loads(down_json.output)["broker"]["weaknesses"]
    assert "/readyz" in weakness["problem"]


def test_a_broker_that_answers_and_cannot_serve_is_a_reason_to_act(tmp_path: Path, status: Status) -> None:
    engine = Engine.open(tmp_path / "broker")
    with serving(engine) as server:
        engine.close()
        refused = status("--broker", server.url)

    assert refused.exit_code == 1
    assert "503" in refused.output
