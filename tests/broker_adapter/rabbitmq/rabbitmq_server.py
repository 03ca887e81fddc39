"""A RabbitMQ server of the tests' own: plain AMQP, AMQP over TLS and the management API, on a throw-away folder.

Debian 12's is version 3.10. scripts/test installs it. It dies with pytest, however pytest ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

import pytest
import requests

from outbox_broker.http.server import Tls
from tests.engines.java_server import free_port

HOST: Final = "127.0.0.1"
ADMIN: Final = ("admin", "admin-secret")
MESSAGE_BYTES_MAX: Final = 1_000_000
START_SECONDS_MAX: Final = 180
COMMAND_SECONDS_MAX: Final = 120
POLL_SECONDS: Final = 0.05

_GUARD = Path(__file__).parents[2] / "fixtures" / "guarded.py"
_PROGRAMS: Final = Path("/usr/lib/rabbitmq/bin")
"""Where Debian has the programs themselves; those on the path want another user."""


class RabbitMqServer:
    """One server. `kill` and `start` are for tests of crashes: data and ports stay. Start it from the main thread."""

    def __init__(self, folder: Path, *, tls: Tls) -> None:
        """`tls`: the server's certificate, which also signs those of its clients."""
        self._folder = folder
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port, self.tls_port, self._api_port = free_port(HOST), free_port(HOST), free_port(HOST)
        self._mapper_port, self._node_port = free_port(HOST), free_port(HOST)

    @property
    def management_url(self) -> str:
        """Of the management API."""
        return f"http://{HOST}:{self._api_port}"

    def start(self) -> None:
        """Start unless it runs, and wait until it takes connections. The first user, ADMIN, may do all."""
        if self._processes:
            return
        program = _program("rabbitmq-server")
        self._folder.mkdir(exist_ok=True)
        (self._folder / "rabbitmq.conf").write_text(self._configuration())
        (self._folder / "plugins").write_text("[rabbitmq_management].")
        # Erlang's port mapper would outlive the node, so it is a process of ours that the node finds.
        self._begin([_port_mapper(), "-port", str(self._mapper_port), "-address", HOST, "-relaxed_command_check"])
        self._begin([program])
        deadline = time.monotonic() + START_SECONDS_MAX
        while not self._serves():
            assert time.monotonic() < deadline, self._log()
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"the server ended with {self._processes[-1].wait(POLL_SECONDS)}: {self._log()}")

    def kill(self) -> None:
        """End it by SIGKILL. Idempotent."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped by SIGSTOP for the length of a block: connections stay, nothing is answered."""
        self._processes[-1].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[-1].send_signal(signal.SIGCONT)

    def api(self, method: str, path: str, **body: Any) -> Any:
        """Ask the management API as ADMIN; the answer, None where it is empty."""
        answer = requests.request(
            method, f"{self.management_url}/api/{path}", json=body or None, auth=ADMIN, timeout=COMMAND_SECONDS_MAX
        )
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

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

    def control(self, *command: str) -> None:
        """rabbitmqctl."""
        done = subprocess.run(
            [_program("rabbitmqctl"), "--longnames", *command],
            env=self._environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def connections(self) -> int:
        """How many clients are connected by AMQP, as the kernel sees it."""
        ports = {f"{self.port:04X}", f"{self.tls_port:04X}"}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].rpartition(":")[2] in ports and row[3] == "01" for row in rows)

    def _begin(self, command: list[str]) -> None:
        with (self._folder / "output").open("ab") as output:
            guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid())]
            self._processes.append(
                subprocess.Popen(
                    [*guard, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment()
                )
            )

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
            "disk_free_limit.absolute": "50MB",
        }
        return "".join(f"{name} = {value}\n" for name, value in lines.items())

    def _environment(self) -> dict[str, str]:
        folder = self._folder
        return {
            **os.environ,
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the server, instead of starting it
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_NODENAME": f"test@{HOST}",
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "ERL_EPMD_PORT": str(self._mapper_port),
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
        """All that it listens on is there once the management API answers: the plugins come last."""
        with contextlib.suppress(OSError, requests.RequestException):
            socket.create_connection((HOST, self.port), timeout=5).close()
            return requests.get(f"{self.management_url}/api/whoami", auth=ADMIN, timeout=5).ok
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


def _program(name: str) -> str:
    program = _PROGRAMS / name
    if not program.exists():
        _missing()
    return str(program)


def _port_mapper() -> str:
    beside = next((str(one) for one in Path("/usr/lib/erlang").glob("erts-*/bin/epmd")), None)
    found = shutil.which("epmd") or beside
    assert found is not None, "there is no epmd, which comes with RabbitMQ's Erlang"
    return found


def _missing() -> NoReturn:
    allowed = os.environ.get("OUTBOX_TEST_ALLOW_MISSING", "").split(",")
    if "rabbitmq" in allowed and os.environ.get("CI", "").lower() not in {"1", "true"}:
        pytest.skip("NOT TESTED on rabbitmq: no server, and OUTBOX_TEST_ALLOW_MISSING names it")
    pytest.fail(
        "no RabbitMQ server to test on. Run ./scripts/servers, which installs one; or go without: "
        "OUTBOX_TEST_ALLOW_MISSING=rabbitmq",
        pytrace=False,
    )
