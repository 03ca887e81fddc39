"""The clients in other languages, written from the protocol's page, work against a real broker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "examples" / "clients"
SECONDS_MAX = 120


def run(*command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} on this machine")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(command, input=stdin, capture_output=True, timeout=SECONDS_MAX, env=environment)


def test_the_javascript_client_repeats_what_the_protocol_says_may_be_sent_again() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    then = dict(re.findall(r"^\| `([a-z-]+)` \| \d{3} \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    [kinds] = re.findall(
        r"MAY_BE_REPEATED = new Set\(\[(.*?)\]", (CLIENTS / "outbox_client.mjs").read_text(), re.DOTALL
    )

    repeated = set(re.findall(r"'([a-z-]+)'", kinds))

    assert repeated == {kind for kind, cure in then.items() if cure.startswith("again")}
    assert len(repeated) < len(then) > 25


@pytest.mark.processes
def test_the_javascript_client_publishes_consumes_retries_and_cancels(shared_url: str, topic: str) -> None:
    done = run("node", str(CLIENTS / "outbox_client.mjs"), shared_url, topic, "ticketing")

    assert done.returncode == 0, done.stderr.decode()
    assert sorted(done.stdout.decode().splitlines()) == [
        "canceled: canceled",
        "handled: binary attempt 1 00fffe",
        "handled: order-17 attempt 2 " + b'{"order_id": 17}'.hex(),
        "published: stored, duplicate",
        "refused: invalid-message, again: false",
    ]
    broker = HttpBroker(shared_url)
    figures = broker.admin.figures(topic, "ticketing")
    broker.close()
    assert (figures["backlog"], figures["in_flight"], figures["dead"]) == (0, 0, 0)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_shell_script_publishes_lines_once_however_often_it_is_run(shared_url: str, topic: str) -> None:
    lines = 'plain\n{"quoted": "\\"}\n\u4e2d\u6587\nlast without an end'.encode()

    first, second = (run("bash", str(CLIENTS / "publish.sh"), shared_url, topic, topic, stdin=lines) for _ in range(2))

    assert (first.returncode, first.stdout) == (0, b"published 4\n"), first.stderr.decode()
    assert (second.returncode, second.stdout) == (0, b"published 4\n")
    broker = HttpBroker(shared_url)
    taken = broker.pull(topic, "g", max_messages=10)
    broker.close()
    assert [one.body for one in taken] == lines.split(b"\n")


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_shell_script_says_which_line_was_refused(shared_url: str) -> None:
    done = run("bash", str(CLIENTS / "publish.sh"), shared_url, "no%20topic", "p", stdin=b"x\n")

    assert done.returncode == 1
    assert b"line 1" in done.stderr
    assert b"invalid-name" in done.stderr
