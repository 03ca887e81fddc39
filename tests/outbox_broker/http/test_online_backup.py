"""`outbox broker backup` of a broker that runs, under load: what was acknowledged before it is in the backup, what was
settled does not come again, and neither the death of the broker nor that of the backup spoils one.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerError, BrokerRefused, NotAuthorized
from tests.broker_adapter.servers import DEADLINE_S, ServerProcess, delay_process
from tests.fixtures.command_line import Done, outbox
from tests.fixtures.fork_server import environment, fork_server

TOPIC, GROUP = "orders", "billing"
HOUR_MS = 3_600_000
SOON_MS = 300
SMALL = '[broker]\nsegment_bytes = "64KiB"\nretention_bytes = "1KiB"\n'


def backup(data: Path, to: Path, url: str, *options: str) -> Done:
    """Run the command beside the broker."""
    return outbox("broker", "backup", str(data), "--to", str(to), "--url", url, "--rate", "max", *options)


class Load:
    """Clients that publish, schedule, cancel, pull and acknowledge, and know what they asked and what was answered."""

    def __init__(self, url: str) -> None:
        self.changed = threading.Condition()
        self.asked: dict[str, int] = {}
        """Ids of messages that were published, or may be, and when they are due."""
        self.stored: set[str] = set()
        self.settling: set[str] = set()
        """Asked to be acknowledged or canceled, or pulled."""
        self.acked: set[str] = set()
        self.canceled: set[str] = set()
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in (self._produce, self._consume)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block is left, or the broker died."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(DEADLINE_S)

    def wait_for(self, count: int) -> None:
        """Wait until so many were stored, acknowledged and canceled, each."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: min(len(self.stored) // 10, len(self.acked), len(self.canceled)) >= count, DEADLINE_S
            )

    def _run(self, work: Callable[[Broker, int], None]) -> None:
        broker = connect(self._url, timeout_ms=DEADLINE_S * 1_000)
        with suppress(BrokerError):  # it was killed
            number = 0
            while not self._stop.is_set():
                work(broker, number)
                number += 1
        broker.close()

    def _produce(self, broker: Broker, number: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        dues = {f"now-{number}-{index}": 0 for index in range(8)}
        dues |= {f"soon-{number}": now_ms + SOON_MS, f"far-{number}": now_ms + HOUR_MS}
        dues |= {f"gone-{number}": now_ms + HOUR_MS}
        with self.changed:
            self.asked |= dues
        batch = [
            Message(id=one, topic=TOPIC, body=one.encode() * 50, deliver_at_ms=due_ms or None)
            for one, due_ms in dues.items()
        ]
        results = broker.publish(batch)
        with self.changed:
            self.stored |= {result.id for result in results if result.status == "stored"}
            self.settling.add(f"gone-{number}")
        statuses = broker.cancel([f"gone-{number}"])
        with self.changed:
            self.canceled |= {f"gone-{number}"} if statuses == ["canceled"] else set()
            self.changed.notify_all()

    def _consume(self, broker: Broker, _number: int) -> None:
        deliveries = broker.pull(TOPIC, GROUP, max_messages=20, wait_ms=100, invisible_ms=1_000)
        with self.changed:
            self.settling |= {delivery.id for delivery in deliveries}
        statuses = broker.ack([delivery.receipt for delivery in deliveries]) if deliveries else []
        with self.changed:
            acked = {one.id for one, status in zip(deliveries, statuses, strict=True) if status == "acked"}
            self.acked |= acked
            self.changed.notify_all()


class Known:
    """What was answered by a moment."""

    def __init__(self, load: Load) -> None:
        with load.changed:
            self.stored, self.acked, self.canceled = set(load.stored), set(load.acked), set(load.canceled)


def check_restored(url: str, load: Load, known: Known) -> None:
    """Consume all of the restored broker: nothing that was known at the backup is missing, or comes again."""
    far = {one for one in known.stored if one.startswith("far-")}
    wanted = {one for one in known.stored if not one.startswith(("far-", "gone-"))} - load.settling
    got: set[str] = set()
    broker = connect(url, timeout_ms=DEADLINE_S * 1_000)
    deadline = time.monotonic() + DEADLINE_S
    while not wanted <= got:
        assert time.monotonic() < deadline, sorted(wanted - got)[:10]
        for delivery in broker.pull(TOPIC, GROUP, max_messages=500, wait_ms=1_000):
            assert load.asked[delivery.id] <= time.time_ns() // 1_000_000, "early"
            got.add(delivery.id)
            assert broker.ack([delivery.receipt]) == ["acked"]
    broker.close()
    client = AdminClient(url)
    assert got <= load.asked.keys()
    assert not got & (known.acked | known.canceled)
    assert [one for one in far if client.scheduled_message(one) is None] == []
    assert [one for one in known.canceled if client.scheduled_message(one) is not None] == []


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
