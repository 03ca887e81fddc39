"""A server's certificate and key, read from files once and checked: what new connections are shown, and until when."""

from __future__ import annotations

import re
import ssl
from binascii import a2b_base64
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from outbox_core.common.errors import ConfigurationError

_FIRST_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_KEY_MARK: Final = b"PRIVATE KEY-----"
_OF_ANOTHER_KEY: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
_VERSION_TAG: Final = 0xA0
_UTC_TIME_TAG: Final = 0x17


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A context for the handshakes of new connections.

    A renewed certificate is another context: one that has been used resumes sessions that were begun under the old
    certificate.
    """

    context: ssl.SSLContext
    ends_at: datetime | None
    """When the certificate expires, in UTC; None if its file is PEM of a rare kind."""

    @classmethod
    def load(cls, chain: Path, key: Path) -> Self:
        """Read a certificate chain and its key, in PEM. Raises ConfigurationError that names the file to mend."""
        chain_data, key_data = _read(chain), _read(key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(chain, key)
        except OSError as error:  # SSLError is one of them
            raise ConfigurationError(_problem(chain, key, error, has_key=_KEY_MARK in key_data)) from error
        return cls(context, _end(chain_data))


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path} for TLS")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path} for TLS: {error.strerror}") from error


def _problem(chain: Path, key: Path, error: OSError, *, has_key: bool) -> str:
    reason = getattr(error, "reason", None)
    if reason in _OF_ANOTHER_KEY:
        return f"the key {key} is not that of the certificate {chain}: give the key with which it was requested"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=chain)
    except OSError:
        return f"{chain} is no certificate chain in PEM"
    if not has_key:
        return f"{key} is no private key in PEM"
    return f"{chain} and {key} are no certificate and its key: {reason or error}"


def _end(chain_data: bytes) -> datetime | None:
    """Returns the end of the first certificate's validity; None if it is not found. See RFC 5280, section 4.1."""
    found = _FIRST_CERTIFICATE.search(chain_data)
    if found is None:
        return None
    try:
        return _not_after(a2b_base64(found[1]))
    except (ValueError, IndexError):
        return None


def _not_after(der: bytes) -> datetime:
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # tbsCertificate
    tag, _, end = _element(der, at)
    if tag == _VERSION_TAG:
        at = end
    for _ in ("serialNumber", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # validity
    _, _, at = _element(der, at)  # notBefore
    tag, start, end = _element(der, at)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME_TAG else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[start:end].decode("ascii"), form).replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Returns an element's tag, and where its content starts and ends."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        of_length = length & 0x7F
        length = int.from_bytes(der[start : start + of_length])
        start += of_length
    return der[at], start, start + length
