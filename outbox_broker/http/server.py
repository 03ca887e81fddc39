"""The HTTP server: a socket, an event loop that accepts connections, an orderly shutdown. The engine belongs to the
caller.

Each connection gets a slot of the connection table (admission_limits), and TLS if configured; connection.py serves it.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

from outbox_broker.http.access_control import Access
from outbox_broker.http.admission_limits import ConnectionSlot, ConnectionTable
from outbox_broker.http.application import Application
from outbox_broker.http.connection import HttpConnection, ServerContext
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.request_context import Services
from outbox_broker.http.routes import ROUTES, Route
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_broker.http.service_ports import ServicePorts
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_OTHER_PORT: Final = "choose another --port, or 0 for a free one"
FILES_KEPT: Final = 96
"""Descriptors kept free of connections for the logs, or a third of all if there are few."""
SWEEP_MS_MIN: Final = 20
SWEEP_MS_MAX: Final = 500
"""The interval of deadline checks: a tenth of the shortest deadline, within these limits."""
BACKLOG: Final = 2_048
ACCEPT_PAUSE_S: Final = 0.1
"""Pause after a failed accept, mostly for lack of descriptors: other connections end meanwhile."""
LOG_LINES_PER_MINUTE: Final = 10
"""Log lines per minute for events that strangers can cause."""
_STORAGE_CHECK_MS: Final = 1_000
_WATCH_JOIN_SECONDS: Final = 10


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

    def serve(self, served: ServicePorts) -> None:
        """Serve these ports from now on, from any thread. Requests in progress go on with those before, and waits for
        messages end, so that their clients ask anew.
        """
        self.services.served = served
        with self._stop_lock:
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(self.services.polls.restart)

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


class LogRateLimit:
    """A rate limit for log lines that anybody can cause."""

    def __init__(self) -> None:
        self._since, self._count = monotonic(), 0

    def allows(self) -> bool:
        """Returns whether one more line may be logged, and counts it."""
        now = monotonic()
        if now - self._since >= 60:
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= LOG_LINES_PER_MINUTE


@dataclass(slots=True, eq=False)
class Listener:
    """Accepts connections on a bound socket until its task is cancelled."""

    context: ServerContext
    bound: socket.socket
    tls: Callable[[], ssl.SSLContext | None]
    """Returns that of the next connection."""
    log_rate: LogRateLimit = field(default_factory=LogRateLimit)
    opening: dict[asyncio.Task[None], socket.socket] = field(default_factory=dict)

    async def run(self) -> None:
        """Accept connections."""
        self.bound.settimeout(0)
        self.bound.listen(BACKLOG)
        loop = self.context.loop
        while True:
            try:
                accepted, address = await loop.sock_accept(self.bound)
            except OSError as error:
                if self.log_rate.allows():
                    logger.warning("connection_not_accepted", extra={"error": error.strerror})
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            slot = self.context.table.enter(_network_of(str(address[0])), partial(_shut_down, accepted))
            if slot is None:
                accepted.close()
                continue
            task = loop.create_task(self._open(accepted, slot))
            self.opening[task] = accepted
            task.add_done_callback(self.opening.pop)

    def stop_opening(self) -> None:
        """End the connections whose TLS handshake is not complete."""
        for accepted in self.opening.values():
            _shut_down(accepted)

    async def _open(self, accepted: socket.socket, slot: ConnectionSlot) -> None:
        """Create a connection on a socket; a client that does not complete the handshake in time is dropped."""
        connection = HttpConnection(self.context, slot)
        tls = self.tls()
        timeout_s = self.context.settings.request_head_ms_max / 1000 if tls else None
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self.context.loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s
            )
            slot.evict = connection.abort
        except OSError:  # gone, or no TLS: strangers can cause this at any rate
            self.context.table.leave(slot)
            accepted.close()


def _shut_down(accepted: socket.socket) -> None:
    """End a connection being created. Cancelling the creation would leave a half-created one behind."""
    with suppress(OSError):  # it is closed already
        accepted.shutdown(socket.SHUT_RDWR)


def _network_of(address: str) -> str:
    """Returns the key for counting connections: an IPv4 address, or the /64 of an IPv6 one: one subscriber."""
    parsed = ip_address(address.partition("%")[0])
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(ip_network((parsed, 64), strict=False))


class LoopErrors:
    """The event loop's exception handler: logs errors, with a rate limit."""

    def __init__(self) -> None:
        self._log_rate = LogRateLimit()

    def handle(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log one error of a callback or a transport."""
        if self._log_rate.allows():
            error = context.get("exception")
            logger.error("event_loop_error", extra={"error": str(context.get("message"))}, exc_info=error)


class StorageWatch:
    """Within its block, a thread checks the storage, and stops the server once it has failed for good, so that what
    supervises the process starts it again.

    A failed sync is final for the process that saw it: it can make nothing durable any more, and a second sync would
    prove nothing. The next process recovers what is on the disk, as after a crash. PostgreSQL and etcd end in the same
    way. A failing /livez would not do: systemd has no probe. Not for an embedded broker, whose process is its user's,
    nor for a node of a cluster, which opens the shard again.
    """

    def __init__(
        self, check: Callable[[], None], *, stop: Callable[[], None], every_ms: int = _STORAGE_CHECK_MS
    ) -> None:
        """`check`: raises StorageFailed if the storage takes nothing until it is reopened. `stop`: of the server."""
        self._check = check
        self._stop = stop
        self._every_ms = every_ms
        self._ended = threading.Event()
        self._failure: StorageFailed | None = None
        self._thread = threading.Thread(target=self._run, name="storage-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_WATCH_JOIN_SECONDS)

    def raise_failure(self) -> None:
        """Raise the error for which the server was stopped, if any."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        is_logged = False
        while not self._ended.wait(self._every_ms / 1000):
            try:
                self._check()
                is_logged = False
            except StorageFailed as error:
                self._failure = error
                logger.critical("server_stops_for_its_storage", extra={"error": str(error)})
                self._stop()
                return
            except Exception:  # too many open files; or a disk that will fail the next sync, which ends the server
                if not is_logged:
                    logger.exception("storage_check_failed")
                is_logged = True
