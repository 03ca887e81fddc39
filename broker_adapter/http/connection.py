"""One broker's address and a pool of connections to it: a request in, an answer or an error out. Not what they mean."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
import requests
from requests import exceptions as http
from requests.adapters import HTTPAdapter
from requests.hooks import default_hooks
from requests.structures import CaseInsensitiveDict
from urllib3.exceptions import NewConnectionError, ProtocolError

from broker_adapter.http.answers import read_answer
from broker_adapter.http.failures import of_answer, of_exception
from messaging.decoding import json_decoder, msgpack_decoder
from messaging.errors import BrokerUnavailable, ConfigurationError
from messaging.wire import (
    JSON_TYPE,
    MSGPACK_TYPE,
)

Shape = TypeVar("Shape", bound=msgspec.Struct)

CONNECT_TIMEOUT_S_MAX: Final = 5.0
USER_AGENT: Final = "outbox-mq"


class WireCodec(StrEnum):
    """What goes over the wire: MessagePack for speed, JSON to read along."""

    MSGPACK = "msgpack"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to reach a broker. `ca_file` None means the certificates that requests brings."""

    url: str
    token: str | None = field(default=None, repr=False)
    timeout_ms: int = 10_000
    ca_file: str | None = None
    pool_size: int = 16
    codec: WireCodec = WireCodec.MSGPACK

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError(
                "an HTTP broker's URL looks like http://127.0.0.1:7788, with nothing behind the path"
            )
        if parts.username or parts.password:
            raise ConfigurationError("a broker's URL carries no user or password; pass token=")
        if self.timeout_ms < 1 or self.pool_size < 1:
            raise ConfigurationError("timeout_ms and pool_size must be at least 1")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ConfigurationError("a token is printable ASCII, and not empty")


class Connection:
    """Thread-safe and fork-safe: a child process gets connections of its own, never its parent's."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._base = options.url.rstrip("/")
        self._lock = threading.Lock()
        self._pool: HTTPAdapter | None = None
        self._process = os.getpid()
        self._closed = False
        self._type = MSGPACK_TYPE if options.codec is WireCodec.MSGPACK else JSON_TYPE
        self._headers = {"accept": self._type, "accept-encoding": "identity", "user-agent": USER_AGENT}
        if options.token is not None:
            self._headers["authorization"] = f"Bearer {options.token}"

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
    ) -> Shape:
        """One request. Each try takes at most the time-out, `wait_ms` on top of it, and a second a MiB of the answer.

        It is sent a second time, once, where that is safe: where no connection could be made, so that nothing was sent,
        or, if it is `repeatable`, where the connection broke before the answer was whole. After a time-out it is not:
        a broker that is late is not helped by the same work twice.
        """
        what = f"{method} {path}"
        request = self._request(method, path, body, query=query)
        try:
            response = self._exchange(request, wait_ms=wait_ms)
        except http.RequestException as first:
            if not _may_repeat(first, repeatable=repeatable):
                raise of_exception(first, what=what) from first
            try:
                response = self._exchange(request, wait_ms=wait_ms)
            except http.RequestException as error:
                raise of_exception(error, what=what) from error
        if response.status_code != 200:
            raise of_answer(response, what=what)
        return self._decode(response, answer, what=what)

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
            owned = self._process == os.getpid()
        if pool is not None and owned:
            pool.close()

    def _request(
        self, method: str, path: str, body: msgspec.Struct | None, *, query: dict[str, str] | None
    ) -> requests.PreparedRequest:
        """Put together by hand: what a Session merges into it costs a third of a small request."""
        request = requests.PreparedRequest()
        request.method = method
        request.url = self._base + path + (f"?{urlencode(query)}" if query else "")
        request.headers = CaseInsensitiveDict(self._headers)
        request.hooks = default_hooks()
        if body is not None:
            data = self._encode(body)
            request.body = data
            request.headers["content-type"] = self._type
            request.headers["content-length"] = str(len(data))
        elif method != "GET":
            request.headers["content-length"] = "0"
        return request

    def _exchange(self, request: requests.PreparedRequest, *, wait_ms: int) -> requests.Response:
        timeout_s = self.options.timeout_ms / 1000
        response = self._own_pool().send(
            request,
            stream=True,
            timeout=(min(timeout_s, CONNECT_TIMEOUT_S_MAX), timeout_s + wait_ms / 1000),
            verify=self.options.ca_file or True,
        )
        return read_answer(response, timeout_s=timeout_s)

    def _own_pool(self) -> HTTPAdapter:
        """This process's pool. After a fork the parent's is left alone: its sockets are not ours to write to."""
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._pool is None or self._process != os.getpid():
                self._pool, self._process = self._new_pool(), os.getpid()
            return self._pool

    def _new_pool(self) -> HTTPAdapter:
        """Without a Session nothing of the environment is asked: no proxies, no .netrc, no other certificates."""
        return HTTPAdapter(pool_connections=1, pool_maxsize=self.options.pool_size, max_retries=0)

    def _encode(self, body: msgspec.Struct) -> bytes:
        return msgspec.msgpack.encode(body) if self.packed else msgspec.json.encode(body)

    def _decode(self, response: requests.Response, answer: type[Shape], *, what: str) -> Shape:
        kind = response.headers.get("content-type", "").partition(";")[0]
        try:
            return _decoder(kind, answer).decode(response.content)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
            raise BrokerUnavailable(f"{what}: the answer is not one of this protocol ({error})") from error


def _may_repeat(error: http.RequestException, *, repeatable: bool) -> bool:
    if isinstance(error, http.Timeout | http.SSLError | http.ProxyError):
        return False
    inner = error.args[0] if error.args else None
    if isinstance(getattr(inner, "reason", None), NewConnectionError):
        return True
    broken = isinstance(error, http.ConnectionError | http.ChunkedEncodingError) and isinstance(inner, ProtocolError)
    return repeatable and broken


def _decoder(kind: str, answer: type[Shape]) -> msgspec.json.Decoder[Shape] | msgspec.msgpack.Decoder[Shape]:
    if kind == MSGPACK_TYPE:
        return msgpack_decoder(answer)
    if kind == JSON_TYPE:
        return json_decoder(answer)
    raise LookupError(f"media type {kind!r}")
