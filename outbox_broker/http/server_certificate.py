"""A server's certificate and key, read from files once and checked: what new connections are shown, and until when."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Self

from outbox_core.common.errors import ConfigurationError

_KEY_MARK: Final = b"PRIVATE KEY-----"
_OF_ANOTHER_KEY: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


class PassphraseNeeded(Exception):
    """A key is encrypted. Without a callback that raises it, OpenSSL would wait for somebody at the terminal."""


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A context for the handshakes of new connections.

    A renewed certificate is another context: one that has been used resumes sessions that were begun under the old
    certificate.
    """

    context: ssl.SSLContext
    ends_at: datetime | None
    """When the certificate expires, in UTC; None if only OpenSSL can read its file."""

    @classmethod
    def load(cls, chain: Path, key: Path) -> Self:
        """Read a certificate chain and its key, in PEM. Raises ConfigurationError that names the file to mend."""
        chain_data, key_data = _read(chain), _read(key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(chain, key, _refuse_passphrase)
        except PassphraseNeeded as error:
            raise ConfigurationError(f"the key {key} is encrypted: give one without a passphrase") from error
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


def _refuse_passphrase() -> str:
    raise PassphraseNeeded


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
    # Imported where there is TLS: a server without it starts sooner.
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(chain_data)[0].not_valid_after_utc
    except ValueError:
        return None
