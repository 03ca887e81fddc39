"""Reads a server's certificate, key and tokens again: what a SIGHUP asks for, or a look at files that have changed. The
settings that name the files stay.

Unless `credentials_interval_ms` says so, files are not looked at by themselves: only who renews them knows when
certificate and key are both complete. Where they are replaced whole, as those of a Secret in a pod are, nobody need
send a signal. An expired certificate is taken with a warning, as at a start: refusing it would hold up the removal of a
token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from outbox_broker.config.broker_config import BrokerConfig
from outbox_broker.http.access_control import Access
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.reload_signal import ReloadSignal

logger: EventLogger = EventLogger(__name__)


def reload_credentials(
    config: BrokerConfig, use: Callable[[Access, ServerCertificate | None], bool], *, reloads: ReloadSignal
) -> None:
    """From now on read all files when a signal asks for it, or when a look at them finds others, and `use` what they
    hold; if one of them is unusable, none is used. Logs what came of it.

    `use` returns whether the tokens differ from those before.
    """
    files, interval_ms = _CredentialFiles(config, use), config.credentials_interval_ms
    every_s = None if interval_ms is None else interval_ms / 1_000
    reloads.start(files.read, look=files.look, every_s=every_s)


class _CredentialFiles:
    """The files, for the one thread of the reloads."""

    def __init__(self, config: BrokerConfig, use: Callable[[Access, ServerCertificate | None], bool]) -> None:
        self._config = config
        self._use = use
        self._read: Sequence[str] | None = None
        """Digests of what was read last, or refused; None: whatever the server started with, which the first look reads
        again, since it may be another one by now.
        """

    def look(self) -> None:
        """Read the files if they hold something else than when they were read last."""
        if self._digests() != self._read:
            self.read()

    def read(self) -> None:
        """Read the files, and use them."""
        config = self._config
        # Before they are read: what replaces them in between differs from this at the next look, and is read then.
        self._read = self._digests()
        if config.tokens is None and config.tls_cert is None:
            logger.info("nothing_to_reload", extra={"hint": "it was started without --tls-cert and without --tokens"})
            return
        try:
            access, tls = config.access(), config.tls
            certificate = None if tls is None else tls.load()
        except ConfigurationError as error:
            problem = str(error)
        else:
            _log_success(access, certificate, tokens_changed=self._use(access, certificate))
            return
        cure = "nothing has changed: mend the file, and send SIGHUP again"
        if config.credentials_interval_ms is not None:
            cure = "nothing has changed: mend the file, which is read when it differs"
        logger.error("reload_refused", extra={"error": problem, "cure": cure})

    def _digests(self) -> Sequence[str]:
        paths = [self._config.tokens, self._config.tls_cert, self._config.tls_key]
        return [_digest(path) for path in paths if path is not None]


def _digest(path: Path) -> str:
    """Returns what tells two contents apart; of a file that cannot be read, the reason."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return str(error)


def _log_success(access: Access, certificate: ServerCertificate | None, *, tokens_changed: bool) -> None:
    figures: dict[str, object] = {}
    if access.tokens is not None:
        figures |= {"tokens": len(access.tokens), "tokens_changed": tokens_changed}
    if certificate is not None:
        figures["certificate_ends"] = "unknown" if certificate.ends_at is None else certificate.ends_at.isoformat()
    logger.info("credentials_reloaded", extra=figures)
