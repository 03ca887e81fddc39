"""Keeps connections to one host, made by urllib3, for the next request. Does not know what is sent over them.

urllib3 resolves, connects and does TLS as it does for requests; the certificates are those that requests brings, or a
file of the user's. Nothing of the environment is asked: no proxies, no .netrc, no other certificates.
"""

from __future__ import annotations

import ssl
import threading
import weakref
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult

from requests import exceptions as http
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from outbox_core.common.errors import ConfigurationError

PORTS: Final = {"http": 80, "https": 443}


class ConnectionPool:
    """Up to `kept_max` idle connections, the last used first. Thread-safe; of one process."""

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
