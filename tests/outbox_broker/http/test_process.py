"""`outbox broker serve` as a process: ready, drained, killed, started twice, started wrongly."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import requests

from outbox_broker.engine.engine import Engine
from outbox_core import Message
from outbox_core.journal.block import SegmentHead, SegmentKind
from outbox_core.messages import limits
from tests.broker_adapter.servers import ServerProcess
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]
DEADLINE_S = 120.0


def outbox(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return fork_server().run("outbox", *arguments, env=environment(**more))


def test_what_was_answered_survives_kill_9(server_process: ServerProcess, client: Client, topic: str) -> None:
    server_process.start()
    stored: list[str] = []
    stop, more = threading.Event(), threading.Condition()

    def publish_until_told() -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not stop.is_set():
                batch = [{"id": f"m{len(stored) + number}", "body": ""} for number in range(5)]
                try:
                    answer = session.post(
                        f"{server_process.url}/v1/publish", json=of_topic(topic, *batch), timeout=DEADLINE_S
                    ).json()
                except requests.RequestException:
                    return
                with more:
                    stored.extend(one["id"] for one in answer["results"])
                    more.notify_all()

    publisher = threading.Thread(target=publish_until_told)
    publisher.start()
    with more:
        assert more.wait_for(lambda: len(stored) >= 100, DEADLINE_S)
    server_process.kill()
    stop.set()
    publisher.join(DEADLINE_S)

    server_process.start()

    pulled: list[str] = []
    group = f"{server_process.url}/v1/topics/{topic}/groups/g"
    while found := client("POST", f"{group}/pull", json={"max_messages": 1_000}).json()["deliveries"]:
        pulled += [one["id"] for one in found]
    assert len(stored) >= 100
    assert pulled[: len(stored)] == stored
    assert len(pulled) <= len(stored) + 5, "at most the batch that was not answered"


def test_sigterm_turns_unready_finishes_what_is_in_work_and_exits_0(server_process: ServerProcess, topic: str) -> None:
    server_process.start()
    url = server_process.url
    answers: list[requests.Response] = []

    def wait_for_messages() -> None:
        with requests.Session() as session:
            session.trust_env = False
            pull = f"{url}/v1/topics/{topic}/groups/g/pull"
            answers.append(session.post(pull, json={"wait_ms": limits.PULL_WAIT_MS_MAX}, timeout=DEADLINE_S))

    waiter = threading.Thread(target=wait_for_messages)
    waiter.start()
    with requests.Session() as session:
        session.trust_env = False
        deadline = time.monotonic() + DEADLINE_S
        while "broker_http_waiting_pulls 1.0" not in session.get(f"{url}/metrics", timeout=DEADLINE_S).text:
            assert time.monotonic() < deadline

    code = server_process.end(signal.SIGTERM)
    waiter.join(DEADLINE_S)

    assert code == 0
    assert [answer.json() for answer in answers] == [{"deliveries": []}]
    assert not server_process.ready_file.exists()


def test_sigint_ends_it_as_well(server_process: ServerProcess) -> None:
    server_process.start()

    assert server_process.end(signal.SIGINT) == 0


def test_a_second_server_on_the_same_folder_is_refused_and_the_holder_named(server_process: ServerProcess) -> None:
    server_process.start()

    second = outbox("broker", "serve", "--data", str(server_process.folder), "--port", "0")

    assert second.returncode == 2
    assert second.stdout == ""
    [line] = second.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert f"process {server_process.pid}" in line


def test_a_log_that_cannot_be_understood_is_one_clear_error_that_names_the_file(tmp_path: Path) -> None:
    engine = Engine.open(tmp_path / "data")
    engine.publisher.publish([Message(id=f"m{number}", topic="t", body=b"x" * 100) for number in range(3)])
    engine.close()
    [segment] = (tmp_path / "data" / "messages").glob("*.segment")
    head = SegmentHead(kind=SegmentKind.ACTIONS, epoch=1, first=0, created_at_ms=0).encode()
    segment.write_bytes(head + segment.read_bytes()[len(head) :])

    result = outbox("broker", "serve", "--data", str(tmp_path / "data"), "--port", "0")

    assert result.returncode == 1
    [line] = result.stderr.strip().splitlines()
    assert segment.stem in line
    assert "restore" in line


def test_a_port_in_use_is_one_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]

        result = outbox("broker", "serve", "--data", str(tmp_path / "data"), "--port", str(port))

    assert result.returncode == 2
    [line] = result.stderr.strip().splitlines()
    assert f"port {port}" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--data"),
        (("--host", "0.0.0.0"), "--tokens"),
        (("--host", "::"), "--tokens"),
        (("--tokens", "none.toml"), "none.toml"),
        (("--tls-cert", "none.pem"), "--tls-key"),
        (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "none.pem"),
        (("--durability", "never"), "durability"),
        (("--port", "70000"), "port"),
        (("--config", "none.toml"), "none.toml"),
        (("--host", "no.such.host.invalid", "--insecure-no-auth"), "no.such.host.invalid"),
    ],
)
def test_a_wrong_start_is_one_line_that_names_the_cure(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    data = () if not options else ("--data", str(tmp_path / "data"))

    result = outbox("broker", "serve", *data, *options)

    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "data").exists(), "nothing was made"


def test_a_server_with_tokens_and_tls_serves_those_who_have_one(
    server_process: ServerProcess, client: Client, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    tokens = tmp_path / "tokens.toml"
    digest = hashlib.sha256(b"the-secret").hexdigest()
    tokens.write_text(f'[[tokens]]\nname = "a"\nsha256 = "{digest}"\nroles = ["read"]\ntopics = ["*"]\n')
    chain, key = certificate
    server_process.start("--tokens", str(tokens), "--tls-cert", str(chain), "--tls-key", str(key))

    known = client(
        "GET", f"{server_process.url}/v1/topics", headers={"authorization": "Bearer the-secret"}, verify=str(chain)
    )
    stranger = client("GET", f"{server_process.url}/v1/topics", verify=str(chain))

    assert server_process.url.startswith("https://")
    assert (known.status_code, stranger.status_code) == (200, 401)
    check = outbox("broker", "check", "--url", server_process.url, "--ca-file", str(chain))
    assert check.returncode == 0, check.stderr


def test_check_tells_a_probe_whether_the_broker_serves(server_process: ServerProcess) -> None:
    server_process.start()
    up = outbox("broker", "check", "--ready", "--url", server_process.url)
    live = outbox("broker", "check", "--live", OUTBOX_BROKER__URL=server_process.url)
    server_process.kill()
    down = outbox("broker", "check", "--url", server_process.url)

    assert (up.returncode, live.returncode) == (0, 0)
    assert json.loads(up.stdout)["status"] == "ok"
    assert all(one["observed"] for one in json.loads(up.stdout)["checks"])
    assert down.returncode == 1
    assert down.stderr.startswith("error: ")


def test_a_token_is_made_with_its_secret_on_stderr_alone() -> None:
    result = outbox("broker", "token", "payments", "--role", "publish", "--role", "read", "--topic", "payment.*")

    secret = result.stderr.strip().rpartition(" ")[2]
    assert hashlib.sha256(secret.encode()).hexdigest() in result.stdout
    assert secret not in result.stdout
    assert 'roles = ["publish", "read"]' in result.stdout


@pytest.mark.processes
def test_log_lines_are_json_and_bodies_are_not_in_them(tmp_path: Path, topic: str) -> None:
    ready = tmp_path / "ready"
    command = [
        *(sys.executable, "-m", "outbox", "broker", "serve", "--data", str(tmp_path / "data"), "--port", "0"),
        *("--ready-file", str(ready), "--log-level", "debug"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().strip().rpartition(" ")[2]
        with requests.Session() as session:
            session.trust_env = False
            session.post(f"{url}/v1/publish", json=of_topic(topic, {"body": "a-secret"}), timeout=DEADLINE_S)
        process.send_signal(signal.SIGTERM)
        lines = process.stderr.read().splitlines()

    assert process.returncode == 0
    events = {json.loads(line)["event"]: json.loads(line) for line in lines}
    assert events.keys() >= {"broker_opened", "server_stopping", "server_stopped"}
    opened = events["broker_opened"]
    assert (opened["folder"], opened["durability"], opened["topics"]) == (str(tmp_path / "data"), "fsync", 0)
    assert opened["version"] == version("outbox-mq")
    assert (opened["scheduled"], opened["quarantined_bytes"]) == (0, 0)
    assert "a-secret" not in "".join(lines)
