"""Translates a broker's URL to librdkafka's settings: durability, time-outs, TLS and login."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.limits import BODY_BYTES_MAX, HEADERS_BYTES_MAX, KEY_BYTES_MAX

URL_OPTIONS: Final = frozenset({"security", "sasl"})
SECURITY: Final = frozenset({"plaintext", "ssl", "sasl_plaintext", "sasl_ssl"})
PASSWORD_MECHANISMS: Final = frozenset({"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"})
TOKEN_MECHANISM: Final = "OAUTHBEARER"  # noqa: S105 - the name of a mechanism
TIMEOUT_MS_MIN: Final = 100
RETRY_MS: Final = 100
MESSAGE_BYTES_MAX: Final = BODY_BYTES_MAX + HEADERS_BYTES_MAX + KEY_BYTES_MAX + 65_536
"""Above what a message of ours can be, so that the server decides what is too large."""
TOKEN_SECONDS: Final = 3_600


@dataclass(frozen=True, slots=True)
class KafkaServers:
    """librdkafka's settings of every client, of which repr() shows none, and the servers' addresses, for messages."""

    settings: Mapping[str, object] = field(repr=False)
    addresses: str


def client_settings(
    url: BrokerUrl, *, timeout_ms: int, token: str | None = None, ca_file: str | None = None
) -> dict[str, object]:
    """The settings of producers and admin clients. Raises ConfigurationError for options that contradict each other."""
    if url.path:
        raise ConfigurationError(f"a kafka URL has no path, and this one has /{url.path}: topics are named by messages")
    if timeout_ms < TIMEOUT_MS_MIN:
        raise ConfigurationError(f"timeout_ms must be at least {TIMEOUT_MS_MIN}, not {timeout_ms}")
    ca_file = ca_file or url.file("ca_file")
    security = _security(url, has_token=token is not None, has_ca=ca_file is not None)
    settings: dict[str, object] = {"bootstrap.servers": url.addresses, "security.protocol": security, "log_level": 0}
    settings |= _time_settings(timeout_ms)
    if security.endswith("ssl"):
        settings |= _tls_settings(url, ca_file)
    elif ca_file or url.file("cert_file") or url.file("key_file"):
        raise ConfigurationError(f"certificates are not used with security={security}: say security=ssl or sasl_ssl")
    if security.startswith("sasl"):
        settings |= _login_settings(url, token)
    elif url.user or url.password or token or "sasl" in url.options:
        raise ConfigurationError(f"a login is not used with security={security}: say security=sasl_ssl")
    return settings


def producer_settings(client: Mapping[str, object], *, timeout_ms: int) -> dict[str, object]:
    """The settings of a producer: acknowledged by all in-sync replicas, written once in a session, in order.

    Retries end before the time-out, so that the server's own reason is reported and not that the time was over. The
    default linger lets requests fill while a batch is queued; to wait for the delivery reports ends it.
    """
    return {
        **client,
        "acks": "all",
        "enable.idempotence": True,
        "allow.auto.create.topics": False,
        "topic.metadata.propagation.max.ms": 0,
        "partitioner": "murmur2_random",  # of keys; the one that Kafka's Java clients have
        "message.max.bytes": MESSAGE_BYTES_MAX,
        "message.timeout.ms": timeout_ms,
        "request.timeout.ms": timeout_ms,
        "retry.backoff.ms": RETRY_MS,
        "retry.backoff.max.ms": RETRY_MS,
        "retries": max(1, timeout_ms // (2 * RETRY_MS)),
    }


def _time_settings(timeout_ms: int) -> dict[str, object]:
    return {
        "socket.timeout.ms": min(max(timeout_ms, 10), 300_000),
        "socket.connection.setup.timeout.ms": min(max(timeout_ms, 1_000), 60_000),
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
    }


def _security(url: BrokerUrl, *, has_token: bool, has_ca: bool) -> str:
    """Returns the URL's security protocol; by default TLS if there are certificates, and SASL if there is a login."""
    login = "sasl_" if url.user or url.password or has_token or "sasl" in url.options else ""
    wire = "ssl" if has_ca or "cert_file" in url.options else "plaintext"
    return url.choice("security", default=login + wire, among=SECURITY)


def _tls_settings(url: BrokerUrl, ca_file: str | None) -> dict[str, object]:
    certificate, key = url.file("cert_file"), url.file("key_file")
    if (certificate is None) != (key is None):
        raise ConfigurationError("cert_file and key_file in the broker's URL belong together: give both")
    settings = {"ssl.ca.location": ca_file, "ssl.certificate.location": certificate, "ssl.key.location": key}
    return {name: setting for name, setting in settings.items() if setting is not None}


def _login_settings(url: BrokerUrl, token: str | None) -> dict[str, object]:
    default = "PLAIN" if token is None else TOKEN_MECHANISM
    mechanism = url.choice("sasl", default=default, among=PASSWORD_MECHANISMS | {TOKEN_MECHANISM})
    if mechanism == TOKEN_MECHANISM:
        return {"sasl.mechanism": mechanism, "oauth_cb": _token_source(token)}
    if token is not None:
        raise ConfigurationError(f"a token is not used with sasl={mechanism}: say sasl={TOKEN_MECHANISM}")
    if not url.user or not url.password:
        raise ConfigurationError(f"sasl={mechanism} needs a user and a password: kafka://user:password@host:9092")
    return {"sasl.mechanism": mechanism, "sasl.username": url.user, "sasl.password": url.password}


def _token_source(token: str | None) -> object:
    """Returns librdkafka's callback for tokens: takes a string, returns a token and its expiry in Unix seconds."""
    if token is None:
        raise ConfigurationError(f"sasl={TOKEN_MECHANISM} needs the option token=")
    return lambda _: (token, time.time() + TOKEN_SECONDS)
