"""Serves /livez, /readyz, /healthz and /metrics of a service, on a port of its own. Not an API."""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_STOP_SECONDS_MAX: Final = 5
_PAGES: Final = ("/metrics", "/livez", "/readyz", "/healthz")


class HealthReport(Protocol):
    """The result of a service's checks."""

    @property
    def is_healthy(self) -> bool:
        """Whether no check failed."""

    def as_json(self) -> dict[str, Any]:
        """The body of a health page."""


class MonitoredService(Protocol):
    """What probes ask of a service. Both are called by several threads, at any time, and wait for nothing."""

    def alive(self) -> bool:
        """Whether its threads run: if not, it is to be restarted."""

    def health(self) -> HealthReport:
        """Look at everything that it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusLimits:
    """What clients of the status page may occupy."""

    connections_max: int = 32
    """Connections, and threads. When all are in use, the oldest connection ends for a new one."""
    room_seconds_max: float = 1
    """So long a new connection waits for the thread of the oldest one to end; then it is closed."""
    connection_seconds_max: float = 10
    """From accepting a connection, which serves one request, to the end of the answer."""


class _Server(ThreadingHTTPServer):
    """Logs what a request failed of, but not that its client is gone, as probes of a port are: nobody failed."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], *, limits: StatusLimits
    ) -> None:  # fmt: skip
        """Listen on an address of either version of IP. Raises OSError."""
        self._limits = limits
        self._released = threading.Condition()
        self._accepted_s: dict[socket.socket, float] = {}  # in the order of acceptance
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, if need be in the place of the oldest one. Called when it is accepted."""
        if self._has_room():
            with self._released:
                self._accepted_s[request] = time.monotonic()
            super().process_request(request, client_address)
        else:  # the threads of the connections that were ended have not noticed it yet
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections whose time is over. Called twice a second."""
        ends_s = time.monotonic() - self._limits.connection_seconds_max
        with self._released:
            for connection, accepted_s in self._accepted_s.items():
                if accepted_s <= ends_s:
                    _shut_down(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and release its place. Called when it was served, too."""
        with self._released:  # before it is closed: its descriptor may be another connection's afterwards
            self._accepted_s.pop(request, None)
            self._released.notify_all()
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close the port and the connections."""
        super().server_close()
        with self._released:
            for connection in self._accepted_s:
                _shut_down(connection)

    def _has_room(self) -> bool:
        """Whether a connection may be added; where all places are taken, the oldest one is ended for it."""
        with self._released:
            if len(self._accepted_s) >= self._limits.connections_max:
                _shut_down(next(iter(self._accepted_s)))
            return self._released.wait_for(
                lambda: len(self._accepted_s) < self._limits.connections_max, timeout=self._limits.room_seconds_max
            )

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's arguments
        """Called in the thread of a request."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("status_request_failed", exc_info=error)


class StatusServer:
    """Serves from a thread; start() and stop() are idempotent."""

    def __init__(
        self,
        service: MonitoredService,
        *,
        registry: CollectorRegistry,
        host: str,
        port: int,
        limits: StatusLimits | None = None,
    ) -> None:
        """Raises ConfigurationError if it cannot listen on the port."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/metrics":
                        self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                    case "/livez":
                        self._say({"status": "ok"}) if service.alive() else self._say({"status": "fail"}, 503)
                    case "/readyz" | "/healthz":
                        health = service.health()
                        self._say(health.as_json(), 200 if health.is_healthy else 503)
                    case _:
                        self._say({"status": "no such page", "pages": _PAGES}, 404)

            def _say(self, body: Mapping[str, Any], status: int = 200) -> None:
                self._answer(status, "application/json", json.dumps(body).encode())

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Cache-Control", "no-store")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                """Does nothing: probes are not logged."""

        try:
            self._server = _Server(host, port, Handler, limits=limits or StatusLimits())
        except OSError as error:
            is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            cure = "choose an address of this machine as --host" if is_of_host else "choose another port"
            raise ConfigurationError(f"cannot listen on {host}, port {port} ({error.strerror}); {cure}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="status-page", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Start serving."""
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(_STOP_SECONDS_MAX)
        self._server.server_close()


def _shut_down(connection: socket.socket) -> None:
    """Wake up the thread of a connection, which closes it."""
    with suppress(OSError):  # its client has ended it
        connection.shutdown(socket.SHUT_RDWR)
