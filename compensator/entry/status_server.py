"""Serves /livez, /readyz, /healthz and /metrics of a compensator, on a port of its own. Not an API."""

from __future__ import annotations

import errno
import json
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from compensator.service.service import CompensatorService
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_REQUEST_TIMEOUT_SECONDS: Final = 5
_PAGES: Final = ("/metrics", "/livez", "/readyz", "/healthz")


class _Server(ThreadingHTTPServer):
    """Logs what a request failed of, but not that its client is gone, as probes of a port are: nobody failed."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen on an address of either version of IP. Raises OSError."""
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's arguments
        """Called in the thread of a request."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("status_request_failed", exc_info=error)


class StatusServer:
    """Serves from a thread; start() and stop() are idempotent."""

    def __init__(self, service: CompensatorService, *, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises ConfigurationError if it cannot listen on the port."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_SECONDS

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
            self._server = _Server(host, port, Handler)
        except OSError as error:
            is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            cure = "choose an address of this machine as --host" if is_of_host else "choose another port"
            raise ConfigurationError(f"cannot listen on {host}, port {port} ({error.strerror}); {cure}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="compensator-status", daemon=True)

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
            self._thread.join(_REQUEST_TIMEOUT_SECONDS)
        self._server.server_close()
