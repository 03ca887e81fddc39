"""TLS to bookies: its settings, and a check of one bookie that names what is wrong. Without Java.

BookKeeper's client reports a failed handshake as a lack of bookies. So nodes and `outbox delay status` ask each bookie
for TLS themselves (the request START_TLS of BookKeeper's protocol, version 3) and verify its certificate.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_core.common.deadline_socket import DeadlineSocket
from outbox_core.common.errors import ConfigurationError

_AT_ONCE_MAX: Final = 16
_ANSWER_BYTES_MAX: Final = 1024
_BOOKIE: Final = re.compile(r"(?P<host>.+):(?P<port>[0-9]{1,5})")
# Request{header: {version: 3, operation: START_TLS (9), txnId: 1}, startTLSRequest (field 106): {}}
_START_TLS: Final = bytes.fromhex("0a06080310091801d20600")
# Request{header: {version: 3, operation: GET_BOOKIE_INFO (8), txnId: 2}, getBookieInfoRequest (105): {requested: 1}}
_GET_BOOKIE_INFO: Final = bytes.fromhex("0a06080310081802ca06020801")
_STATUS_TAG: Final = 0x10
_OK: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieTls:
    """Files in PEM. `ca_file` signed the bookies' certificates; `certificate` and `key` (PKCS #8) are shown to bookies
    that ask for a client's.
    """

    ca_file: Path
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError that names the file which is missing or damaged."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("a client certificate for bookies needs both its file and that of its key")
        self.context()

    def context(self) -> ssl.SSLContext:
        """Returns a context that verifies certificates and names. Raises ConfigurationError."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"the CA file of the bookies {self.ca_file} cannot be used: {error}") from error
        if self.certificate is None or self.key is None:
            return context
        try:
            # An encrypted key is refused, where ssl would ask for its password on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"the certificate {self.certificate} with the key {self.key} cannot be shown to bookies: {error}"
            ) from error
        return context


def tls_problems(bookies: Iterable[str], tls: BookieTls, *, timeout_ms: int) -> dict[str, str]:
    """Returns the bookies, by `host:port`, to which no TLS connection can be made, each with the reason and the cure.

    A bookie that is named by another id than its address is not asked.
    """
    addressed = [name for name in bookies if _BOOKIE.fullmatch(name)]
    context = tls.context()
    with ThreadPoolExecutor(max_workers=_AT_ONCE_MAX) as pool:
        found = pool.map(lambda name: _problem(name, context, timeout_ms=timeout_ms), addressed)
        return {name: problem for name, problem in zip(addressed, found, strict=True) if problem is not None}


def _problem(bookie: str, context: ssl.SSLContext, *, timeout_ms: int) -> str | None:
    host, _, port = bookie.rpartition(":")
    host = host.strip("[]")
    deadline_s = time.monotonic() + timeout_ms / 1000
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_ms / 1000) as plain:
            if not _is_accepted(DeadlineSocket(plain, deadline_s=deadline_s), _START_TLS):
                return "has no TLS: set tlsProviderFactoryClass in its configuration, or leave ledgers_tls out"
            plain.settimeout(max(0.001, deadline_s - time.monotonic()))  # its handshake reads by itself
            with context.wrap_socket(plain, server_hostname=host) as encrypted:
                return _refusal(DeadlineSocket(encrypted, deadline_s=deadline_s))
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message}; renew it, or correct ledgers_ca_file"
    except ssl.SSLError as error:
        return f"TLS fails: {error.reason or error}"
    except OSError as error:
        return f"does not answer: {error}"


def _refusal(encrypted: DeadlineSocket) -> str | None:
    """Returns why a bookie refuses a client that it accepted a handshake of.

    With TLS 1.3 it looks at the client's certificate afterwards, and at the roles in it with the first request.
    """
    try:
        if _is_accepted(encrypted, _GET_BOOKIE_INFO):
            return None
        reason = "not authorized"
    except OSError as error:
        reason = str(getattr(error, "reason", None) or error)
    return f"it refuses this client: {reason}; correct ledgers_certificate and ledgers_key"


def _is_accepted(connection: DeadlineSocket, request: bytes) -> bool:
    """Send a request; returns whether its answer has the status OK. Raises OSError."""
    connection.sendall(struct.pack(">I", len(request)) + request)
    (size,) = struct.unpack(">I", _read(connection, 4))
    if not 2 < size <= _ANSWER_BYTES_MAX:
        raise OSError("it is no bookie")
    answer = _read(connection, size)
    # Response{header, status, ...}: the header is field 1 and shorter than 128 bytes, the status is field 2.
    status = answer[2 + answer[1] :]
    return len(status) > 1 and status[0] == _STATUS_TAG and status[1] == _OK


def _read(connection: DeadlineSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("it closed the connection")
        data += part
    return data
