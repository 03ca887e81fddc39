"""The HTTP server: a socket, an event loop, an orderly shutdown. The engine belongs to the caller."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from outbox_broker.http.access_control import Access
from outbox_broker.http.application import Application
from outbox_broker.http.connection_table import ConnectionTable
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.listener import Listener, LoopErrors
from outbox_broker.http.request_context import Services
from outbox_broker.http.routes import ROUTES, Route
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_broker.http.server_context import ServerContext
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_OTHER_PORT: Final = "choose another --port, or 0 for a free one"
FILES_KEPT: Final = 96
"""Descriptors kept free of connections for the logs, or a third of all if there are few."""
SWEEP_MS_MIN: Final = 20
SWEEP_MS_MAX: Final = 500
"""The interval of deadline checks: a tenth of the shortest deadline, within these limits."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a certificate chain and its key, in PEM."""

    certificate: Path
    key: Path

    def load(self) -> ServerCertificate:
        """Read them. Raises ConfigurationError that names the file to mend."""
        return ServerCertificate.load(self.certificate, self.key)


def bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not accept yet. Raises ConfigurationError that names the cure."""
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
    """One server on a bound socket; run() blocks until stop(), which is thread-safe."""

    def __init__(
        self,
        served: ServicePorts,
        bound: socket.socket,
        *,
        settings: HttpSettings,
        access: Access | None = None,
        tls: Tls | None = None,
        routes: Sequence[Route] = ROUTES,
    ) -> None:
        """`routes`: those of the protocol, unless the server is for other programs than clients. Raises
        ConfigurationError if the files of `tls` are unusable.
        """
        self._routes = routes
        self.services = Services.of(served, settings, access=access or Access(), clock=SystemClock())
        self._socket = bound
        self._certificate: ServerCertificate | None = None
        self._show(None if tls is None else tls.load())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = asyncio.Event()
        self._ends = asyncio.Event()
        self._stop_lock = threading.Lock()
        self._is_stopped_early = False

    @property
    def url(self) -> str:
        """The URL for clients."""
        host, port = self._socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self._certificate else 'http'}://{name}:{port}"

    def run(self, *, on_ready: Callable[[str], None] | None = None, handle_signals: bool = False) -> None:
        """Serve until stop(), or with `handle_signals` until SIGTERM or SIGINT; a second one ends it at once.

        Requests in progress are completed, within `shutdown_timeout_ms`.
        """
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._run(on_ready or _ignore, handle_signals=handle_signals))

    def stop(self) -> None:
        """Start the shutdown, from any thread; idempotent. A second call ends it at once."""
        with self._stop_lock:  # protects against a loop that starts or ends concurrently
            if self._loop is None:
                self._is_stopped_early = True
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)

    def use(self, access: Access, certificate: ServerCertificate | None) -> bool:
        """Check the next request of each connection, and show new connections a certificate, by these; from any thread.
        Returns whether the tokens differ from those before.

        Open connections go on, and so do requests that were admitted; but where tokens differ, waits for messages end.
        """
        has_other_tokens = access != self.services.access
        self.services.access = access
        self._show(certificate)
        with self._stop_lock:
            if has_other_tokens and self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(self.services.polls.end_waits)
        return has_other_tokens

    def _show(self, certificate: ServerCertificate | None) -> None:
        """Show this certificate to new connections, and its end to whoever watches."""
        self._certificate = certificate
        ends_at = None if certificate is None else certificate.ends_at
        self.services.metrics.certificate_end.set(0 if ends_at is None else ends_at.timestamp())
        if ends_at is not None and ends_at <= datetime.now(UTC):
            logger.warning(
                "certificate_expired", extra={"ended": ends_at.isoformat(), "cure": "renew it, and send SIGHUP"}
            )

    def _tls_context(self) -> ssl.SSLContext | None:
        return None if self._certificate is None else self._certificate.context

    async def _run(self, on_ready: Callable[[str], None], *, handle_signals: bool) -> None:
        loop, settings = asyncio.get_running_loop(), self.services.settings
        loop.set_exception_handler(LoopErrors().handle)
        with self._stop_lock:
            self._loop = loop
            if self._is_stopped_early:
                self._stop()
        if handle_signals:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signal_number, self._stop)
        context = ServerContext(
            loop=loop, application=Application(self.services, routes=self._routes), budget=self.services.budget,
            table=_connection_table(settings), settings=settings,
        )  # fmt: skip
        self.services.metrics.watch(context.table, context.budget)
        listener = Listener(context, self._socket, tls=self._tls_context)
        accepting, sweeping = loop.create_task(listener.run()), loop.create_task(_sweep(context))
        try:
            await asyncio.sleep(0)  # so that it listens
            if not self._stops.is_set():
                on_ready(self.url)
            await self._stops.wait()
            accepting.cancel()
            self._socket.close()
            await self._finish(context, listener)
        finally:
            sweeping.cancel()
            accepting.cancel()
            self.services.threads.close()

    async def _finish(self, context: ServerContext, listener: Listener) -> None:
        """Complete requests in progress; those that exceed the time-out, or a second stop(), are aborted."""
        listener.stop_opening()
        context.stop()
        loop = context.loop
        deadline = loop.time() + self.services.settings.shutdown_timeout_ms / 1000
        while (context.connections or listener.opening) and loop.time() < deadline and not self._ends.is_set():
            await asyncio.sleep(SWEEP_MS_MIN / 1000)
        for connection in list(context.connections):
            connection.abort()
        for task in list(context.tasks):
            task.cancel()
        await asyncio.sleep(0)

    def _stop(self) -> None:
        if self._stops.is_set():
            self._ends.set()
            return
        logger.info("server_stopping")
        self.services.stop()
        self._stops.set()


async def _sweep(context: ServerContext) -> None:
    settings = context.settings
    shortest_ms = min(
        settings.request_head_ms_max, settings.request_read_ms_max, settings.response_write_ms_max,
        settings.keep_alive_ms,
    )  # fmt: skip
    while True:
        await asyncio.sleep(min(max(shortest_ms / 10, SWEEP_MS_MIN), SWEEP_MS_MAX) / 1000)
        context.sweep()


def _connection_table(settings: HttpSettings) -> ConnectionTable:
    """Create the table, as large as settings and file descriptors allow; raises the soft descriptor limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_wanted = settings.connections_max + settings.connections_reserved + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < files_wanted:
        soft = files_wanted if hard == resource.RLIM_INFINITY else min(files_wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = settings.connections_max
    if soft != resource.RLIM_INFINITY:
        room = max(1, min(room, soft - max(FILES_KEPT, soft // 3) - settings.connections_reserved))
    if room < settings.connections_max:
        logger.warning("connections_bounded_by_descriptors", extra={"connections_max": room, "descriptors": soft})
    return ConnectionTable(
        connections_max=room,
        per_address_max=min(settings.connections_per_address_max, room),
        reserved_max=settings.connections_reserved,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Returns uvloop's loop if it is installed."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def _ignore(_url: str) -> None:
    pass
