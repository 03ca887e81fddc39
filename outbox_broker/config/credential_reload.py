"""Reads a server's certificate, key and tokens again: what a SIGHUP asks for. The settings that name the files stay.

Files are not watched, nor read after a while: only who renews them knows when certificate and key are both complete. An
expired certificate is taken with a warning, as at a start: refusing it would hold up the removal of a token.
"""

from __future__ import annotations

from collections.abc import Callable

from outbox_broker.config.broker_config import BrokerConfig
from outbox_broker.http.access_control import Access
from outbox_broker.http.server_certificate import ServerCertificate
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


def reload_credentials(config: BrokerConfig, use: Callable[[Access, ServerCertificate | None], bool]) -> None:
    """Read all files, and `use` what they hold; if one of them is unusable, none is used. Logs what came of it.

    `use` returns whether the tokens differ from those before.
    """
    if config.tokens is None and config.tls_cert is None:
        logger.info("nothing_to_reload", extra={"hint": "it was started without --tls-cert and without --tokens"})
        return
    try:
        access, tls = config.access(), config.tls
        certificate = None if tls is None else tls.load()
    except ConfigurationError as error:
        problem = str(error)
    else:
        _log_success(access, certificate, tokens_changed=use(access, certificate))
        return
    cure = "nothing has changed: mend the file, and send SIGHUP again"
    logger.error("reload_refused", extra={"error": problem, "cure": cure})


def _log_success(access: Access, certificate: ServerCertificate | None, *, tokens_changed: bool) -> None:
    figures: dict[str, object] = {}
    if access.tokens is not None:
        figures |= {"tokens": len(access.tokens), "tokens_changed": tokens_changed}
    if certificate is not None:
        figures["certificate_ends"] = "unknown" if certificate.ends_at is None else certificate.ends_at.isoformat()
    logger.info("credentials_reloaded", extra=figures)
