"""Carries requests to one broker over kept connections, blocking: what request_codec builds and decodes."""

from __future__ import annotations

import ssl
import threading
import time
import weakref
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from broker_adapter.http.request_codec import (
    ANSWER_BYTES_MAX,
    PORTS,
    Exchange,
    ExchangeFailed,
    HttpResponse,
    Options,
    Repeat,
    RequestCodec,
    Result,
    parse_answer,
)
from outbox_core.common.deadline_socket import BYTES_A_SECOND_MIN, DeadlineSocket
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

CONNECT_TIMEOUT_S_MAX: Final = 5.0
READ_BYTES: Final = 256 * 1024
_REASON_CHARS_MAX: Final = 500


class HttpTransport:
    """Thread-safe and fork-safe: a child process gets connections of its own, never its parent's."""

    def __init__(self, options: Options) -> None:
        self.codec = RequestCodec(options)
        self._options = options
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None
        self._closed = False
        reset_in_children(self)

    def send(self, request: Exchange[Any, Result], *, guard: Guard = allow) -> Result:
        """One request. Each try takes at most the time-out, its `wait_ms` on top of it, and a second a MiB of the
        request and its answer; making a connection, and sending the request, are within the time-out, but that each
        address of a name that has several is given all of it.

        It is sent a second time, once, where that is safe, see Repeat. `guard` is called before each try, once there is
        a connection; where it raises, nothing is sent.
        """
        data = self.codec.encode(request)
        try:
            response = self._exchange(data, wait_ms=request.wait_ms, guard=guard)
        except ExchangeFailed as first_error:
            if not first_error.may_repeat(request):
                raise self.codec.failure(request, first_error) from first_error
            try:
                response = self._exchange(data, wait_ms=request.wait_ms, guard=guard)
            except ExchangeFailed as error:
                raise self.codec.failure(request, error) from error
        return self.codec.decode(request, response)

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        notice_fork()
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def reset_after_fork(self) -> None:
        """Leave the parent's connections alone in a forked child: they are not its own to write to."""
        self._lock = threading.Lock()
        self._pool = None

    def _exchange(self, data: bytes, *, wait_ms: int, guard: Guard) -> HttpResponse:
        deadline_s = time.monotonic() + self._options.timeout_ms / 1000
        pool = self._own_pool()
        connection = pool.take()
        stays_open = False
        try:
            guard()  # after the connection was made, which takes up to its time-out
            answer = _asked(connection, data, deadline_s=deadline_s, wait_s=wait_ms / 1000)
            stays_open = answer.stays_open
            return answer
        finally:  # whatever ended it, an interrupt too: only what is whole leaves the connection in a known state
            if stays_open:
                pool.give_back(connection)
            else:
                connection.close()

    def _own_pool(self) -> ConnectionPool:
        """This process's connections."""
        notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._pool is None:
                self._pool = self._new_pool()
            return self._pool

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool(
            urlsplit(self._options.url),
            kept_max=self._options.pool_size,
            connect_timeout_s=min(self._options.timeout_ms / 1000, CONNECT_TIMEOUT_S_MAX),
            ca_file=self._options.ca_file,
        )


def read_answer(timed: DeadlineSocket) -> HttpResponse:
    """One answer, its head and its body by the deadline. Raises ExchangeFailed."""
    parser = parse_answer()
    has_begun = False
    try:
        next(parser)
        while True:
            piece = timed.recv(READ_BYTES)
            has_begun = True
            parser.send(piece)
    except StopIteration as whole:
        answer: HttpResponse = whole.value
        return answer
    except TimeoutError as error:
        reason = "the answer trickles: it was not whole in time" if has_begun else "no answer in time"
        raise ExchangeFailed(reason, repeat=Repeat.NEVER) from error
    except OSError as error:
        raise ExchangeFailed(_reason_of(error)) from error


class ConnectionPool:
    """Keeps connections to one host for the next request: up to `kept_max` idle ones, the last used first. Thread-safe;
    of one process.

    urllib3 resolves, connects and does TLS as it does for requests; the certificates are those that requests brings, or
    a file of the user's. Nothing of the environment is asked: no proxies, no .netrc, no other certificates.
    """

    def __init__(self, parts: SplitResult, *, kept_max: int, connect_timeout_s: float, ca_file: str | None) -> None:
        self._parts = parts
        self._kept_max = kept_max
        self._connect_timeout_s = connect_timeout_s
        self._tls = _tls_context(ca_file) if parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        self._closed = False
        # A program that never closes its broker, and a child that drops its parent's, leave no socket to be warned of.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def take(self) -> HTTPConnection:
        """A connection that is open, as far as can be seen. Raises ExchangeFailed where none can be made."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            if connection.is_connected:  # and has nothing to say: a server that closes it makes it readable
                return connection
            connection.close()

    def give_back(self, connection: HTTPConnection) -> None:
        """Keep a connection on which nothing is under way."""
        with self._lock:
            if not self._closed and len(self._idle) < self._kept_max:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close those that are idle, and those that are given back from now on; idempotent."""
        with self._lock:
            self._closed = True
            idle = self._idle.copy()
            self._idle.clear()
        _close_all(idle)

    def _connect(self) -> HTTPConnection:
        connection = self._new_connection()
        try:
            connection.connect()
        except NewConnectionError as error:
            raise ExchangeFailed(_reason_of(error), repeat=Repeat.ALWAYS) from error
        except (HTTPError, OSError) as error:  # in TLS, too, where the host was reached
            connection.close()
            is_late = isinstance(error, ConnectTimeoutError | TimeoutError)
            reason = f"no connection within {self._connect_timeout_s:g} s" if is_late else _reason_of(error)
            raise ExchangeFailed(reason, repeat=Repeat.NEVER) from error
        return connection

    def _new_connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port or PORTS[self._parts.scheme]
        if self._tls is None:
            return HTTPConnection(host, port, timeout=self._connect_timeout_s)
        return HTTPSConnection(host, port, timeout=self._connect_timeout_s, ssl_context=self._tls)


def _asked(connection: HTTPConnection, data: bytes, *, deadline_s: float, wait_s: float) -> HttpResponse:
    """Send a request and read its answer. Raises ExchangeFailed."""
    if connection.sock is None:
        raise ExchangeFailed("the connection is closed")
    timed = DeadlineSocket(connection.sock, deadline_s=deadline_s, paying_bytes_max=ANSWER_BYTES_MAX)
    try:
        timed.sendall(data)
    except TimeoutError as error:
        raise ExchangeFailed("the broker did not take the request in time", repeat=Repeat.NEVER) from error
    except BrokenPipeError:
        pass  # refused before all of it was sent; the answer says why
    except OSError as error:
        raise ExchangeFailed(_reason_of(error)) from error
    timed.extend(wait_s + len(data) / BYTES_A_SECOND_MIN)
    return read_answer(timed)


def _reason_of(error: Exception) -> str:
    """The system's own words where there are any: urllib3 wraps them in texts with object addresses."""
    system = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(system, OSError) and system.strerror and not isinstance(system, ssl.SSLError):
        return system.strerror
    return f"{type(system).__name__}: {system}"[:_REASON_CHARS_MAX]


def _close_all(connections: list[HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    path = Path(ca_file or DEFAULT_CA_BUNDLE_PATH)
    try:
        if path.is_dir():
            return ssl.create_default_context(capath=str(path))
        return ssl.create_default_context(cafile=str(path))
    except OSError as error:
        raise ConfigurationError(f"the certificates in {path} cannot be read: {error.strerror or error}") from error
