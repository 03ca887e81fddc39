"""A RabbitMQ server of the tests' own: plain AMQP, AMQP over TLS and the management API, on a throw-away folder.

Debian 12's is version 3.10. scripts/test installs it. It dies with pytest, however pytest ends. It may be a node of a
cluster, or run the programs of another version.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

import pytest
import requests

from outbox_broker.http.server import Tls
from outbox_demo.ports import free_port
from tests.fixtures.local_server import guarded
from tests.fixtures.stopped_process import stop_process

HOST: Final = "127.0.0.1"
ADMIN: Final = ("admin", "admin-secret")
MESSAGE_BYTES_MAX: Final = 1_000_000
DISK_FREE_LIMIT: Final = "50MB"
START_SECONDS_MAX: Final = 180
COMMAND_SECONDS_MAX: Final = 120
POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class RabbitMqPrograms:
    """Where one version of RabbitMQ and its Erlang are."""

    scripts: Path = Path("/usr/lib/rabbitmq/bin")
    """The programs themselves, as Debian has them; those on the path want another user."""
    erlang: Path = Path("/usr/lib/erlang")

    def script(self, name: str) -> str:
        """A program of RabbitMQ."""
        program = self.scripts / name
        if not program.exists():
            _missing()
        return str(program)

    def port_mapper(self) -> str:
        """Erlang's, by which nodes find each other."""
        found = next((str(one) for one in self.erlang.glob("erts-*/bin/epmd")), None) or shutil.which("epmd")
        assert found is not None, "there is no epmd, which comes with RabbitMQ's Erlang"
        return found


INSTALLED: Final = RabbitMqPrograms()


class ApiRefused(RuntimeError):
    """The management API answered with an error."""


class PortMapper:
    """Erlang's port mapper for some nodes. It would outlive them, so it is a process of ours that they find."""

    def __init__(self, programs: RabbitMqPrograms) -> None:
        self.port = free_port(HOST)
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs."""
        if self._process is None:
            arguments = ("-port", str(self.port), "-address", HOST, "-relaxed_command_check")
            self._process = subprocess.Popen(
                guarded([self._programs.port_mapper(), *arguments]),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "ERL_EPMD_ADDRESS": HOST},
            )  # fmt: skip

    def kill(self) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class RabbitMqServer:
    """One server. `kill` and `start` are for tests of crashes: data and ports stay. Start it from the main thread."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: Tls,
        programs: RabbitMqPrograms = INSTALLED,
        mapper: PortMapper | None = None,
        node: str = f"test@{HOST}",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """`tls`: the server's certificate, which also signs those of its clients. `mapper`: one that it shares with
        others, so that it is not ended with the server. `settings`: more lines of rabbitmq.conf.
        """
        self._folder = folder
        self._tls = tls
        self._programs = programs
        self._shared_mapper = mapper
        self._mapper = mapper or PortMapper(programs)
        self.node = node
        self._settings = settings or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.port, self.tls_port, self._api_port = free_port(HOST), free_port(HOST), free_port(HOST)
        self._node_port = free_port(HOST)

    @property
    def management_url(self) -> str:
        """Of the management API."""
        return f"http://{HOST}:{self._api_port}"

    def start(self) -> None:
        """Start unless it runs, and wait until it takes connections. The first user, ADMIN, may do all."""
        if self._process is None:
            self.begin()
            self.wait_until_served()

    def begin(self) -> None:
        """Start it, without waiting for it."""
        program = self._programs.script("rabbitmq-server")
        self._folder.mkdir(exist_ok=True)
        (self._folder / "rabbitmq.conf").write_text(self._configuration())
        (self._folder / "plugins").write_text("[rabbitmq_management].")
        self._mapper.start()
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                guarded([program]), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment()
            )

    def wait_until_served(self) -> None:
        """Wait until it takes connections. Raises AssertionError with the end of its log where it ended instead."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._serves():
            assert time.monotonic() < deadline, self._log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"the server ended with {self._process.wait(POLL_SECONDS)}: {self._log()}")

    @property
    def is_started(self) -> bool:
        """Whether it was started and not killed by us since."""
        return self._process is not None

    def kill(self) -> None:
        """End it by SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._shared_mapper is None:
            self._mapper.kill()

    def pause(self) -> None:
        """Stop it by SIGSTOP: connections stay, nothing is answered."""
        assert self._process is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped by SIGSTOP for the length of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def api(self, method: str, path: str, **body: Any) -> Any:
        """Ask the management API as ADMIN; the answer, None where it is empty. Raises ApiRefused."""
        answer = requests.request(
            method, f"{self.management_url}/api/{path}", json=body or None, auth=ADMIN, timeout=COMMAND_SECONDS_MAX
        )
        if not answer.ok:
            raise ApiRefused(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else None

    def running_nodes(self) -> set[str]:
        """The nodes of its cluster, as it sees them. Raises ApiRefused while it starts."""
        return {one["name"] for one in self.api("GET", "nodes") if one["running"]}

    def declare(self, queue: str, *, durable: bool = True, auto_delete: bool = False, **arguments: Any) -> None:
        """Make a queue; underscores of arguments stand for dashes: x_max_length is x-max-length."""
        given = {name.replace("_", "-"): value for name, value in arguments.items()}
        path = f"queues/%2F/{quote(queue, safe='')}"
        self.api("PUT", path, durable=durable, auto_delete=auto_delete, arguments=given)

    def bind(self, exchange: str, queue: str, routing_key: str) -> None:
        """Make a binding."""
        self.api("POST", f"bindings/%2F/e/{exchange}/q/{queue}", routing_key=routing_key)

    def add_user(self, name: str, password: str, *, write: str = ".*", tags: str = "") -> None:
        """A user who may publish to exchanges whose name matches `write`, the default one being amq.default."""
        self.api("PUT", f"users/{name}", password=password, tags=tags)
        self.api("PUT", f"permissions/%2F/{name}", configure="", write=write, read="")

    def control(self, *command: str) -> str:
        """rabbitmqctl; what it wrote."""
        done = subprocess.run(
            [self._programs.script("rabbitmqctl"), "--longnames", *command],
            env=self._environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def connections(self) -> int:
        """How many clients are connected by AMQP, as the kernel sees it."""
        ports = {f"{self.port:04X}", f"{self.tls_port:04X}"}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].rpartition(":")[2] in ports and row[3] == "01" for row in rows)

    def _configuration(self) -> str:
        lines = {
            "listeners.tcp.1": f"{HOST}:{self.port}",
            "listeners.ssl.1": f"{HOST}:{self.tls_port}",
            "ssl_options.cacertfile": self._tls.certificate,
            "ssl_options.certfile": self._tls.certificate,
            "ssl_options.keyfile": self._tls.key,
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "false",
            "management.tcp.ip": HOST,
            "management.tcp.port": self._api_port,
            "default_user": ADMIN[0],
            "default_pass": ADMIN[1],
            "max_message_size": MESSAGE_BYTES_MAX,
            "vm_memory_high_watermark.relative": 0.6,
            "disk_free_limit.absolute": DISK_FREE_LIMIT,
            **self._settings,
        }
        return "".join(f"{name} = {value}\n" for name, value in lines.items())

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        return {
            **os.environ,
            "PATH": f"{self._programs.erlang / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, instead of starting it
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "ERL_EPMD_PORT": str(self._mapper.port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none",
        }

    def _serves(self) -> bool:
        """All that it listens on is there once the management API answers: the plugins come last. It answers before it
        knows the nodes.
        """
        with contextlib.suppress(OSError, requests.RequestException, ApiRefused):
            socket.create_connection((HOST, self.port), timeout=5).close()
            return self.node in self.running_nodes()
        return False

    def _log(self) -> str:
        file = self._folder / "output"
        return file.read_text(errors="replace")[-3000:] if file.exists() else "(no log)"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what the server or other threads do, a few milliseconds between two looks."""
    deadline, nothing = time.monotonic() + START_SECONDS_MAX, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        nothing.wait(POLL_SECONDS)


def _missing() -> NoReturn:
    allowed = os.environ.get("OUTBOX_TEST_ALLOW_MISSING", "").split(",")
    if "rabbitmq" in allowed and os.environ.get("CI", "").lower() not in {"1", "true"}:
        pytest.skip("NOT TESTED on rabbitmq: no server, and OUTBOX_TEST_ALLOW_MISSING names it")
    pytest.fail(
        "no RabbitMQ server to test on. Run ./scripts/servers, which installs one; or go without: "
        "OUTBOX_TEST_ALLOW_MISSING=rabbitmq",
        pytrace=False,
    )
