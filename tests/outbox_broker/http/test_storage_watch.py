"""A server whose disk failed a sync ends: what it answered is there for the process that is started after it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox_broker.engine.engine import Engine
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import HttpServer, StorageWatch, bind
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.common.errors import OutboxError, StorageFailed
from outbox_core.messages.message import Message, PublishStatus
from outbox_core.runtime.logs import event_name
from tests.broker_adapter.servers import DEADLINE_S, ServerProcess, delay_process
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.mounts import failing_disk

BATCH, BATCHES_MAX = 100, 1_000
DAY_MS = 86_400_000


class Watched:
    """A server with a watch, in a thread, on a storage that can be made to fail."""

    def __init__(self, folder: Path) -> None:
        self.storage = FailingStorage()
        self.engine = Engine.open(folder, storage=self.storage)
        self._bound = bind("127.0.0.1", 0)
        self.server = HttpServer(ServicePorts.of(self.engine), self._bound, settings=HttpSettings())
        self.watch = StorageWatch(self.engine.check_usable, stop=self.server.stop, every_ms=1)
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self._ready.wait(DEADLINE_S)

    def _run(self) -> None:
        with self.watch:
            self.server.run(on_ready=lambda _url: self._ready.set())

    def close(self) -> None:
        self.server.stop()
        self.thread.join(DEADLINE_S)
        self.engine.close()
        self._bound.close()


def test_a_failed_sync_stops_the_server_and_is_its_error(tmp_path: Path) -> None:
    with closing(Watched(tmp_path / "data")) as watched, closing(HttpBroker(watched.server.url)) as broker:
        watched.storage.fail("sync")
        with pytest.raises(OutboxError):
            broker.publish([Message(id="a", topic="t", body=b"")])
        watched.thread.join(DEADLINE_S)

        assert not watched.thread.is_alive()
        with pytest.raises(StorageFailed, match=r"the disk failed earlier .* until the broker is restarted"):
            watched.watch.raise_failure()
        watched.storage.mend()


def test_a_check_that_fails_otherwise_is_repeated_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stopped, errors = threading.Event(), [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "I/O error")]

    def check() -> None:
        raise errors.pop(0) if errors else StorageFailed("the disk failed")

    with StorageWatch(check, stop=stopped.set, every_ms=1) as watch:
        assert stopped.wait(DEADLINE_S)

    assert [event_name(one) for one in caplog.records] == ["storage_check_failed", "server_stops_for_its_storage"]
    with pytest.raises(StorageFailed, match="the disk failed"):
        watch.raise_failure()


def test_a_server_that_is_stopped_otherwise_has_no_error(tmp_path: Path) -> None:
    with closing(Watched(tmp_path / "data")) as watched:
        watched.server.stop()
        watched.thread.join(DEADLINE_S)

        watched.watch.raise_failure()
        assert not watched.thread.is_alive()


def broker_process(folder: Path, _target: ServerProcess) -> ServerProcess:
    return ServerProcess(folder)


def delay_service_process(folder: Path, target: ServerProcess) -> ServerProcess:
    return delay_process(folder, target_url=target.url)


def publish_until_refused(url: str, *, deliver_at_ms: int | None, meanwhile: Callable[[], None]) -> Sequence[Message]:
    """Publish until the server takes no more; returns what was answered. `meanwhile`: called after the first batch."""
    answered: list[Message] = []
    with closing(HttpBroker(url)) as broker:
        for number in range(BATCHES_MAX):
            batch = [
                Message(id=f"{number}-{one}", topic="t", body=b"x" * 1_000, deliver_at_ms=deliver_at_ms)
                for one in range(BATCH)
            ]
            try:
                assert {one.status for one in broker.publish(batch)} == {PublishStatus.STORED}
            except OutboxError:
                return answered
            answered += batch
            if number == 0:
                meanwhile()
    raise AssertionError("nothing was refused")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("process_of", "is_for_later"),
    [(broker_process, False), (broker_process, True), (delay_service_process, True)],
    ids=["broker", "broker-schedule", "delay-service"],
)
def test_a_process_whose_disk_failed_ends_and_the_next_one_has_what_was_answered(
    tmp_path: Path, process_of: Callable[[Path, ServerProcess], ServerProcess], *, is_for_later: bool
) -> None:
    deliver_at_ms = time.time_ns() // 1_000_000 + DAY_MS if is_for_later else None
    target = ServerProcess(tmp_path / "target")
    target.start()
    try:
        with failing_disk(tmp_path) as disk:
            process = process_of(disk.place / "data", target)
            process.start()
            try:
                answered = publish_until_refused(process.url, deliver_at_ms=deliver_at_ms, meanwhile=disk.fail)
                code = process.ended()
                disk.mend()
                process.start()
                with closing(HttpBroker(process.url)) as broker:
                    again = {
                        one.status
                        for start in range(0, len(answered), BATCH)
                        for one in broker.publish(answered[start : start + BATCH])
                    }
            finally:
                process.kill()
    finally:
        target.kill()

    assert code == 1
    assert again == {PublishStatus.DUPLICATE}
