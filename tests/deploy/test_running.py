"""What units and manifests run, run for real: it serves, answers its probes, tells systemd, and ends in order."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from outbox.migrate import schema_upgrade
from tests.deploy.manifests import KUBERNETES, ROOT, SYSTEMD, containers, exec_start, value
from tests.fixtures.databases import Database

WAIT_SECONDS = 120
TOKEN = "a-token-of-the-test"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def placed(command: list[str], places: dict[str, Path]) -> list[str]:
    """A command line with this machine's paths in place of a cluster's, and a port that is free."""
    _, *arguments = command
    text = "\0".join(arguments)
    for there, here in places.items():
        text = text.replace(there, str(here))
    text = re.sub(r"--port(=|\0)\d+", r"--port\g<1>0", text)
    return [sys.executable, "-m", "outbox", *text.split("\0")]


def probes(name: str) -> list[str]:
    """The paths that Kubernetes asks a container for."""
    [found] = [one.container for one in containers() if one.name == name]
    return sorted({found[probe]["httpGet"]["path"] for probe in found if probe.endswith("Probe")})


def get(url: str, *, token: str | None = None) -> int:
    """The status of an answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_SECONDS) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The secrets of the manifests, as files."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    roles = json.dumps(["publish", "consume", "read"])
    entry = f'[[tokens]]\nname = "test"\nsha256 = "{digest}"\nroles = {roles}\ntopics = ["*"]\n'
    (folder / "tokens.toml").write_text(entry)
    (folder / "broker-token").write_text(TOKEN + "\n")
    (folder / "database-password").write_text("")
    return folder


@pytest.fixture
def broker_url(tmp_path: Path, secrets: Path) -> Iterator[str]:
    """The broker, run as its manifest says."""
    [broker] = [one for one in containers() if one.name == "broker"]
    places = {"/var/lib/outbox-broker": tmp_path / "data", "/run/secrets/outbox-mq": secrets}
    command = [*placed(broker.command, places), "--ready-file", str(tmp_path / "ready")]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("broker ready at"):
                    break
            port = (tmp_path / "ready").read_text().strip().rpartition(":")[2]
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()
            process.communicate()


class Notices:
    """What systemd would be told. It is read all the time, since a program waits where its notices fill the socket."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._changed = threading.Condition()
        self._told: list[str] = []

    def read(self) -> None:
        """Read until the socket is shut down."""
        while data := self._socket.recv(4096):
            with self._changed:
                self._told.append(data.decode())
                self._changed.notify_all()

    def wait_for(self, word: str) -> None:
        """Until a notice has come that begins with this."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(text.startswith(word) for text in self._told), WAIT_SECONDS), word


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[Notices]:
    """The socket that systemd would listen on."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as opened:
        opened.bind(str(tmp_path / "notify"))
        made = Notices(opened)
        reader = threading.Thread(target=made.read)
        reader.start()
        yield made
        opened.shutdown(socket.SHUT_RDWR)
        reader.join(WAIT_SECONDS)


def configured(name: Path, tmp_path: Path, *, database: Database, broker_url: str) -> Path:
    """A folder with a configuration as it is deployed, pointed at the test's database and broker."""
    text = re.sub(r'url = "mysql[^"]*"', f'url = "{database.url}"\nschemas = ["{database.schema}"]', name.read_text())
    text = re.sub(r'url = "http[^"]*"', f'url = "{broker_url}"', text)
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "outbox.toml").write_text(text)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("way", ["systemd", "kubernetes"])
def test_broker_and_compensator_serve_as_deployed_and_end_in_order(
    mariadb: Database, tmp_path: Path, secrets: Path, broker_url: str, notices: Notices, way: str
) -> None:
    schema_upgrade.upgrade(mariadb.url, schema=mariadb.schema)
    unit = SYSTEMD / "outbox-compensator.service"
    [container] = [one for one in containers() if one.name == "compensator"]
    as_deployed = exec_start(unit) if way == "systemd" else container.command
    config = (SYSTEMD if way == "systemd" else KUBERNETES) / "outbox.toml"
    etc = configured(config, tmp_path, database=mariadb, broker_url=broker_url)
    places = {"/etc/outbox-mq": etc, "/run/secrets/outbox-mq": secrets, "%d": secrets}
    environment = {
        **ENVIRONMENT, "NOTIFY_SOCKET": str(tmp_path / "notify"), "OUTBOX_LOG_FORMAT": "json",
        "WATCHDOG_USEC": str(200_000),
    }  # fmt: skip

    with subprocess.Popen(
        placed(as_deployed, places), cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            port = next(found[1] for line in process.stderr if (found := re.search(r"status on port (\d+)", line)))
            notices.wait_for("READY=1")
            notices.wait_for("WATCHDOG=1")
            answers = {path: get(f"http://127.0.0.1:{port}{path}") for path in [*probes("compensator"), "/metrics"]}
            process.send_signal(signal.SIGTERM)
            status = process.wait(int(value(unit, "TimeoutStopSec")))
        finally:
            process.kill()
            process.communicate()
    notices.wait_for("STOPPING=1")

    assert answers == {"/livez": 200, "/readyz": 200, "/metrics": 200}
    assert status == 0
    assert {path: get(broker_url + path) for path in probes("broker")} == {"/livez": 200, "/readyz": 200}
    assert (get(f"{broker_url}/metrics"), get(f"{broker_url}/metrics", token=TOKEN)) == (401, 200)
    assert (tmp_path / "data").is_dir()
