"""Sends requests to one broker over a pool of connections, and returns answers or raises errors."""

from __future__ import annotations

import ssl
import threading
import weakref
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import msgspec
from requests import exceptions as http
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ProtocolError, SSLError

from broker_adapter.http.errors import of_answer, of_exception
from broker_adapter.http.response_reader import HttpResponse, read_answer
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError
from outbox_core.messages.publish_guard import Guard, allow
from outbox_core.protocol.decoder_cache import json_decoder, msgpack_decoder
from outbox_core.protocol.wire import (
    JSON_TYPE,
    MSGPACK_TYPE,
)
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

Shape = TypeVar("Shape", bound=msgspec.Struct)

CONNECT_TIMEOUT_S_MAX: Final = 5.0
USER_AGENT: Final = "outbox-mq"


class WireCodec(StrEnum):
    """The format of bodies: MessagePack is fast, JSON can be read on the wire."""

    MSGPACK = "msgpack"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the connection to a broker. `ca_file` None: the certificates that requests brings."""

    url: str
    token: str | None = field(default=None, repr=False)
    timeout_ms: int = 10_000
    ca_file: str | None = None
    pool_size: int = 16
    codec: WireCodec = WireCodec.MSGPACK

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _host_of(parts)
        except ValueError as error:
            raise ConfigurationError(f"an HTTP broker's URL has no host or port that could be: {error}") from error
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(
                "an HTTP broker's URL looks like http://127.0.0.1:7788, with nothing behind the path but options"
            )
        if parts.username or parts.password:
            raise ConfigurationError("a broker's URL carries no user or password; pass token=, or say ?token_file=")
        if self.timeout_ms < 1 or self.pool_size < 1:
            raise ConfigurationError("timeout_ms and pool_size must be at least 1")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ConfigurationError("a token is printable ASCII, and not empty")


class RequestSender:
    """Thread-safe and fork-safe: a child process gets connections of its own, never its parent's."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._parts = urlsplit(options.url.rstrip("/"))
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None
        self._closed = False
        self._type = MSGPACK_TYPE if options.codec is WireCodec.MSGPACK else JSON_TYPE
        self._base = quote(self._parts.path, safe="/%:@!$&'()*+,;=~")
        self._head = _head_of(self._parts, accept=self._type, token=options.token)
        self.address = _address_of(self._parts)
        """Host and port, for messages: never a user, a password or a token."""
        reset_in_children(self)

    @property
    def packed(self) -> bool:
        """Whether MessagePack is spoken."""
        return self.options.codec is WireCodec.MSGPACK

    def send(
        self,
        method: str,
        path: str,
        answer: type[Shape],
        *,
        body: msgspec.Struct | None = None,
        query: dict[str, str] | None = None,
        wait_ms: int = 0,
        repeatable: bool = False,
        guard: Guard = allow,
    ) -> Shape:
        """One request. Each try takes at most the time-out, `wait_ms` on top of it, and a second a MiB of the answer.

        It is sent a second time, once, where that is safe: where no connection could be made, so that nothing was sent,
        or, if it is `repeatable`, where the connection broke before the answer was whole. After a time-out it is not:
        a broker that is late is not helped by the same work twice. `guard` is called before each try, once there is a
        connection; where it raises, nothing is sent.
        """
        what = f"{method} {path} at {self.address}"
        request = self._request(method, path, body, query=query)
        try:
            response = self._exchange(request, wait_ms=wait_ms, guard=guard)
        except http.RequestException as first_error:
            if not _may_repeat(first_error, repeatable=repeatable):
                raise of_exception(first_error, what=what) from first_error
            try:
                response = self._exchange(request, wait_ms=wait_ms, guard=guard)
            except http.RequestException as error:
                raise of_exception(error, what=what) from error
        if response.status_code != 200:
            raise of_answer(response, what=what)
        return self._decode(response, answer, what=what)

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

    def _request(self, method: str, path: str, body: msgspec.Struct | None, *, query: dict[str, str] | None) -> bytes:
        """The request as it goes over the wire."""
        target = self._base + path + (f"?{urlencode(query)}" if query else "")
        if body is None:
            length = "" if method == "GET" else "content-length: 0\r\n"
            return f"{method} {target} HTTP/1.1\r\n{self._head}{length}\r\n".encode("ascii")
        data = self._encode(body)
        fields = f"content-type: {self._type}\r\ncontent-length: {len(data)}\r\n"
        return f"{method} {target} HTTP/1.1\r\n{self._head}{fields}\r\n".encode("ascii") + data

    def _exchange(self, request: bytes, *, wait_ms: int, guard: Guard) -> HttpResponse:
        timeout_s = self.options.timeout_ms / 1000
        pool = self._own_pool()
        connection = pool.take()
        stays_open = False
        try:
            guard()  # after the connection was made, which takes up to its time-out
            answer = _asked(connection, request, timeout_s=timeout_s, wait_s=wait_ms / 1000)
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
            self._parts,
            kept_max=self.options.pool_size,
            connect_timeout_s=min(self.options.timeout_ms / 1000, CONNECT_TIMEOUT_S_MAX),
            ca_file=self.options.ca_file,
        )

    def _encode(self, body: msgspec.Struct) -> bytes:
        return msgspec.msgpack.encode(body) if self.packed else msgspec.json.encode(body)

    def _decode(self, response: HttpResponse, answer: type[Shape], *, what: str) -> Shape:
        kind = response.headers.get("content-type", "").partition(";")[0]
        try:
            return _decoder(kind, answer).decode(response.content)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
            raise BrokerUnavailable(f"{what}: the answer is not one of this protocol ({error})") from error


def _head_of(parts: SplitResult, *, accept: str, token: str | None) -> str:
    """The header lines that all requests have in common."""
    lines = [f"host: {_host_of(parts)}", f"accept: {accept}", "accept-encoding: identity", f"user-agent: {USER_AGENT}"]
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    return "".join(f"{line}\r\n" for line in lines)


def _host_of(parts: SplitResult) -> str:
    """Host and port as a request names them. Raises ValueError where there can be none like it."""
    name = parts.hostname.encode("idna").decode("ascii") if parts.hostname else ""
    return (f"[{name}]" if ":" in name else name) + (f":{parts.port}" if parts.port else "")


def _address_of(parts: SplitResult) -> str:
    return _host_of(parts) if parts.port else f"{_host_of(parts)}:{PORTS[parts.scheme]}"


def _asked(connection: HTTPConnection, request: bytes, *, timeout_s: float, wait_s: float) -> HttpResponse:
    """Send a request and read its answer. Raises exceptions of requests."""
    socket = connection.sock
    if socket is None:
        raise http.ConnectionError(ProtocolError("the connection is closed"))
    try:
        socket.settimeout(timeout_s)
        socket.sendall(request)
        socket.settimeout(timeout_s + wait_s)
    except TimeoutError as error:
        raise http.ReadTimeout(error) from error
    except BrokenPipeError:
        pass  # refused before all of it was sent; the answer says why
    except OSError as error:
        raise http.ConnectionError(ProtocolError("the connection broke", error)) from error
    return read_answer(socket, timeout_s=timeout_s)


def _may_repeat(error: http.RequestException, *, repeatable: bool) -> bool:
    if isinstance(error, http.Timeout | http.SSLError | http.ProxyError):
        return False
    inner = error.args[0] if error.args else None
    if isinstance(inner, NewConnectionError):
        return True
    return repeatable and isinstance(error, http.ConnectionError) and isinstance(inner, ProtocolError)


def _decoder(kind: str, answer: type[Shape]) -> msgspec.json.Decoder[Shape] | msgspec.msgpack.Decoder[Shape]:
    if kind == MSGPACK_TYPE:
        return msgpack_decoder(answer)
    if kind == JSON_TYPE:
        return json_decoder(answer)
    raise LookupError(f"media type {kind!r}")


PORTS: Final = {"http": 80, "https": 443}


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
        """A connection that is open, as far as can be seen. Raises exceptions of requests where none can be made."""
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
            raise http.ConnectionError(error) from error
        except ConnectTimeoutError as error:
            raise http.ConnectTimeout(error) from error
        except (SSLError, ssl.SSLError) as error:
            connection.close()
            raise http.SSLError(error) from error
        except TimeoutError as error:
            connection.close()
            raise http.ConnectTimeout(error) from error
        except (HTTPError, OSError, UnicodeError) as error:
            connection.close()
            raise http.ConnectionError(error) from error
        return connection

    def _new_connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port or PORTS[self._parts.scheme]
        if self._tls is None:
            return HTTPConnection(host, port, timeout=self._connect_timeout_s)
        return HTTPSConnection(host, port, timeout=self._connect_timeout_s, ssl_context=self._tls)


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
