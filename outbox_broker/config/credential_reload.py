"""Reads a server's certificate, key and tokens again: what a SIGHUP asks for. The settings that name the files stay."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from outbox_broker.config.broker_config import BrokerConfig
from outbox_broker.http.access_control import Access
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


def reload_credentials(config: BrokerConfig, use: Callable[[Access, ServerCertificate | None], None]) -> None:
    """Read all files, and `use` what they hold; if one of them is unusable, none is used. Logs which it was."""
    if config.tokens is None and config.tls_cert is None:
        logger.info("nothing_to_reload", extra={"hint": "it was started without --tls-cert and without --tokens"})
        return
    try:
        access, tls = config.access(), config.tls
        certificate = None if tls is None else tls.load()
    except ConfigurationError as error:
        problem = str(error)
    else:
        use(access, certificate)
        _log_success(config, access, certificate)
        return
    cure = "nothing has changed: mend the file, and send SIGHUP again"
    logger.error("reload_refused", extra={"error": problem, "cure": cure})


def _log_success(config: BrokerConfig, access: Access, certificate: ServerCertificate | None) -> None:
    figures: dict[str, object] = {}
    if access.tokens is not None:
        figures["tokens"] = len(access.tokens)
    if certificate is not None:
        figures["certificate_ends"] = "unknown" if certificate.ends_at is None else certificate.ends_at.isoformat()
    logger.info("credentials_reloaded", extra=figures)
    if certificate is not None and certificate.ends_at is not None and certificate.ends_at <= datetime.now(UTC):
        logger.warning("certificate_expired", extra={"file": str(config.tls_cert), "cure": "renew it, and send SIGHUP"})
