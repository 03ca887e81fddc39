"""The heart of a server process: a socket, uvicorn on it, an orderly end. The engine is its caller's."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from broker.http import app as http_app
from broker.http.access import Access
from broker.http.call import Services
from broker.http.served import Served
from broker.http.settings import HttpSettings
from messaging.errors import ConfigurationError

logger = logging.getLogger(__name__)

_OTHER_PORT = "choose another --port, or 0 for a free one"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a certificate chain and its key, in PEM."""

    certificate: Path
    key: Path


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, and takes no connections yet. Raises ConfigurationError that names the cure."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(f"the host {host!r} cannot be resolved: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        cure = "choose an address of this machine as --host" if error.errno == errno.EADDRNOTAVAIL else _OTHER_PORT
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror}; {cure}") from error
    return bound


class HttpServer:
    """One server on a bound socket; run() blocks until stop(), which any thread may call."""

    def __init__(
        self,
        engine: Served,
        bound: socket.socket,
        *,
        settings: HttpSettings,
        access: Access | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._socket = bound
        self._app = http_app.create_app(engine, settings, access=access)
        self._tls = tls
        self._server = _Server(_uvicorn_config(self._app, settings, tls), on_started=self._on_started)
        self._on_ready: Callable[[str], None] = _ignore
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        host, port = self._socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{name}:{port}"

    @property
    def app(self) -> FastAPI:
        """The application that it serves."""
        return self._app

    def run(self, *, on_ready: Callable[[str], None] | None = None, handle_signals: bool = False) -> None:
        """Serve until stop(), or with `handle_signals` until SIGTERM or SIGINT; a second one ends it at once.

        Requests in work when it stops are finished, within `shutdown_timeout_ms`.
        """
        self._on_ready = on_ready or _ignore
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._run(handle_signals=handle_signals))

    def stop(self) -> None:
        """Begin to stop, from any thread; idempotent. A second call ends it at once."""
        loop = self._loop
        if loop is None:
            self._server.should_exit = True
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._stop)

    async def _run(self, *, handle_signals: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            http_app.close(self._app.state.services)

    def _stop(self) -> None:
        if self._server.should_exit:
            self._server.force_exit = True
            return
        logger.info("server_stopping")
        self._app.state.services.stop()
        self._server.should_exit = True

    def _on_started(self) -> None:
        self._on_ready(self.url)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which end the process by the signal after a clean stop."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()


def _uvicorn_config(app: FastAPI, settings: HttpSettings, tls: Tls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_http_protocol(app.state.services),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=max(1, settings.keep_alive_ms // 1000),
        timeout_graceful_shutdown=max(1, settings.shutdown_timeout_ms // 1000),
        h11_max_incomplete_event_size=settings.request_head_bytes_max,
        backlog=2048,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )


def _http_protocol(services: Services) -> Any:
    """httptools where it is installed; h11, slower, where it is not. Both bound a request's head."""
    if find_spec("httptools") is None:
        return "h11"
    from broker.http.short_http import short_protocol

    return short_protocol(services)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop where it is installed."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def _ignore(_url: str) -> None:
    pass
