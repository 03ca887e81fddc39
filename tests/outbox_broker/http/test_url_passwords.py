"""The password of a URL stands in no output of the command line."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from outbox_core.runtime.command import main

COMMANDS = {
    "check": ["check"],
    "topic list": ["topic", "list"],
    "topic show": ["topic", "show", "orders"],
    "topic delete": ["topic", "delete", "orders", "--yes"],
    "group list": ["group", "list", "orders"],
    "group delete": ["group", "delete", "orders", "billing", "--yes"],
    "publish": ["message", "publish", "orders"],
    "peek": ["message", "peek", "orders"],
    "find": ["message", "find", "orders", "--id", "m1"],
    "scheduled": ["schedule", "list"],
    "scheduled message": ["schedule", "show", "m1"],
    "cancel": ["schedule", "cancel", "m1", "--yes"],
    "refused": ["schedule", "refused"],
    "retry": ["schedule", "retry", "m1"],
    "show": ["group", "show", "orders", "billing"],
    "declare": ["group", "declare", "orders", "billing"],
    "seek": ["group", "seek", "orders", "billing", "--to-offset", "0"],
    "pause": ["group", "pause", "orders", "billing"],
    "dead": ["dead", "list", "orders", "billing"],
    "resume": ["group", "resume", "orders", "billing"],
    "dead letter": ["dead", "show", "orders", "billing", "m1"],
    "redrive": ["dead", "redrive", "orders", "billing"],
}
PASSWORD = "correct-horse"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, nor can anybody else meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield int(one.getsockname()[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_broker_that_does_not_answer_is_named_without_its_password(
    command: str, closed_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://user:{PASSWORD}@127.0.0.1:{closed_port}/base"

    with pytest.raises(SystemExit) as ended:
        main(["broker", *COMMANDS[command], "--url", url])

    shown = capsys.readouterr()
    assert ended.value.code
    assert f"http://127.0.0.1:{closed_port}/base" in shown.err
    assert PASSWORD not in shown.err + shown.out
    assert "user" not in shown.err + shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_no_broker_has_is_refused_by_its_name_alone(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["broker", *COMMANDS[command], "--url", f"http://user:{PASSWORD}@127.0.0.1:1/base?token={PASSWORD}"])

    shown = capsys.readouterr()
    assert ended.value.code
    assert "unknown option 'token'" in shown.err
    assert PASSWORD not in shown.err + shown.out
