"""`outbox broker backup` of a broker that runs, under load: what was acknowledged before it is in the backup, what was
settled does not come again, and neither the death of the broker nor that of the backup spoils one.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Message, connect
from outbox_core.common.errors import BrokerRefused, NotAuthorized
from tests.broker_adapter.servers import DEADLINE_S, ServerProcess, delay_process
from tests.fixtures.command_line import Done, outbox
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox_broker.client_load import HOUR_MS, TOPIC, Known, Load, check_restored

SMALL = '[broker]\nsegment_bytes = "64KiB"\nretention_bytes = "1KiB"\n'


def backup(data: Path, to: Path, url: str, *options: str) -> Done:
    """Run the command beside the broker."""
    return outbox("broker", "backup", str(data), "--to", str(to), "--url", url, "--rate", "max", *options)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[ServerProcess]:
    """A broker on the restored folder, not started yet."""
    process = ServerProcess(tmp_path / "restored")
    yield process
    process.kill()


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, str]:
    """Options of a broker with small segments, which soon go."""
    path = tmp_path / "broker.toml"
    path.write_text(SMALL)
    return "--config", str(path)


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_a_backup_under_load_has_what_was_acknowledged_before_it(
    server_process: ServerProcess, restored: ServerProcess, tmp_path: Path, small: tuple[str, str], durability: str
) -> None:
    server_process.start(*small, "--durability", durability)
    load = Load(server_process.url)
    with load.running():
        load.wait_for(20)
        backup(server_process.folder, tmp_path / "backup", server_process.url).raise_error()
        load.wait_for(40)
        known = Known(load)
        done = backup(server_process.folder, tmp_path / "backup", server_process.url, "--json")
        server_process.kill()
    done.raise_error()

    assert outbox("broker", "verify", str(tmp_path / "backup")).returncode == 0
    outbox("broker", "restore", str(tmp_path / "backup"), "--to", str(restored.folder)).raise_error()
    assert outbox("broker", "log", str(restored.folder)).returncode == 0, "it needs no cut"
    restored.start("--durability", durability)

    assert json.loads(done.stdout)["was_running"] is True
    check_restored(restored.url, load, known)


def test_a_backup_whose_broker_is_killed_goes_on_and_is_whole(
    server_process: ServerProcess, restored: ServerProcess, tmp_path: Path, small: tuple[str, str]
) -> None:
    server_process.start(*small)
    load = Load(server_process.url)
    with load.running():
        load.wait_for(40)
        known = Known(load)
        with copying(server_process, tmp_path / "backup", rate="64KiB") as command:
            assert command.stderr is not None
            command.stderr.readline()  # it has begun to copy
            server_process.kill()
            assert command.wait(DEADLINE_S) == 0

    outbox("broker", "restore", str(tmp_path / "backup"), "--to", str(restored.folder)).raise_error()
    restored.start()

    check_restored(restored.url, load, known)


def test_a_backup_that_is_killed_leaves_the_one_before_and_holds_no_space(
    server_process: ServerProcess, tmp_path: Path, small: tuple[str, str]
) -> None:
    server_process.start(*small)
    links = server_process.folder / "snapshot" / "links"
    load = Load(server_process.url)
    with load.running():
        load.wait_for(20)
        backup(server_process.folder, tmp_path / "backup", server_process.url).raise_error()
        before = (tmp_path / "backup" / "manifest.jsonl").read_bytes()
        load.wait_for(40)
        with copying(server_process, tmp_path / "backup", rate="1KiB") as command:
            assert command.stderr is not None
            command.stderr.readline()
            assert links.exists()
            busy = backup(server_process.folder, tmp_path / "other", server_process.url)
            command.kill()
            command.wait(DEADLINE_S)

        deadline = time.monotonic() + DEADLINE_S
        while links.exists():  # the broker's keeper removes them
            assert time.monotonic() < deadline
        assert outbox("broker", "verify", str(tmp_path / "backup")).returncode == 0
        assert (tmp_path / "backup" / "manifest.jsonl").read_bytes() == before
        backup(server_process.folder, tmp_path / "backup", server_process.url).raise_error()

    assert busy.returncode == 2
    assert "in use" in busy.stderr
    assert outbox("broker", "verify", str(tmp_path / "backup")).returncode == 0


def test_a_broker_of_another_folder_and_one_without_a_backup_that_waits_are_refused(
    server_process: ServerProcess, restored: ServerProcess, tmp_path: Path
) -> None:
    server_process.start()
    restored.start()

    wrong = backup(server_process.folder, tmp_path / "backup", restored.url)
    with pytest.raises(BrokerRefused, match="no backup waits"):
        AdminClient(server_process.url).snapshot("token")

    assert wrong.returncode == 1
    assert "no backup waits" in wrong.stderr
    assert not (server_process.folder / "snapshot" / "links").exists()
    assert not (tmp_path / "backup" / "manifest.jsonl").exists()


def test_only_an_administrator_has_a_snapshot_made(server_process: ServerProcess, tmp_path: Path) -> None:
    made = outbox("broker", "token", "ops", "--role", "publish", "--role", "consume", "--role", "read")
    (tmp_path / "tokens.toml").write_text(made.stdout)
    secret = made.stderr.rpartition(" ")[2].strip()
    server_process.start("--tokens", str(tmp_path / "tokens.toml"))

    with pytest.raises(NotAuthorized):
        AdminClient(server_process.url, token=secret).snapshot("token")


def test_a_delay_service_is_backed_up_while_it_runs(server_process: ServerProcess, tmp_path: Path) -> None:
    server_process.start()
    service = delay_process(tmp_path / "delays", target_url=server_process.url)
    service.start()
    try:
        broker = connect(service.url)
        due_ms = time.time_ns() // 1_000_000 + HOUR_MS
        broker.publish([Message(id="later", topic=TOPIC, body=b"", deliver_at_ms=due_ms)])
        backup(service.folder, tmp_path / "backup", service.url).raise_error()
        broker.close()
    finally:
        service.kill()
    outbox("broker", "restore", str(tmp_path / "backup"), "--to", str(tmp_path / "restored")).raise_error()

    again = delay_process(tmp_path / "restored", target_url=server_process.url)
    again.start()
    try:
        found = AdminClient(again.url).scheduled_message("later")
    finally:
        again.kill()
    assert found is not None


@contextmanager
def copying(server: ServerProcess, to: Path, *, rate: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process, at a rate that leaves time to kill something."""
    options = ["--to", str(to), "--url", server.url, "--rate", rate, "--progress", "json"]
    with fork_server().start(
        "outbox", "broker", "backup", str(server.folder), *options, env=environment(), stderr=subprocess.PIPE
    ) as process:  # fmt: skip
        yield process
