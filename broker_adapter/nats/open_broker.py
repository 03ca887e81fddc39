"""open_broker(): from a URL of NATS to a Broker that publishes to JetStream."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nkeys import NkeysError, from_seed

from broker_adapter.nats.connection import Login
from broker_adapter.nats.nats_publisher import NatsPublisher
from broker_adapter.nats.process_session import NatsServers
from broker_adapter.publishing.broker_url import BrokerUrl, tls_context
from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker

PORT: Final = 4222
OPTIONS: Final = frozenset({"prefix", "inbox_prefix", "creds_file", "nkey_file"})
TLS_SCHEMES: Final = frozenset({"natss", "tls"})
_SUBJECT: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)
_CREDS_PARTS: Final = ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED")


def open_broker(
    url: str, *, timeout_ms: int | None = None, token: str | None = None, ca_file: str | None = None
) -> Broker:
    """A Broker at `nats://user:password@host:4222,host2:4222?prefix=shop`; `natss://` and `tls://` are with TLS.

    `timeout_ms` bounds each call, 10,000 by default; `token` is NATS's own. Does no I/O on the network. Raises
    ConfigurationError for what cannot work.
    """
    parsed = BrokerUrl.parse(url, port=PORT, options=OPTIONS)
    if parsed.path:
        raise ConfigurationError("the URL of NATS has no path; put a prefix before all subjects with ?prefix=")
    servers = NatsServers(
        addresses=tuple(f"nats://{address}" for address in parsed.addresses.split(",")),
        shown_addresses=parsed.addresses,
        login=_login(parsed, token=token, ca_file=ca_file),
    )
    publisher = NatsPublisher(servers, prefix=_subject(parsed, "prefix"))
    return PublishOnlyBroker(publisher, strict=parsed.is_strict, timeout_ms=timeout_ms or parsed.timeout_ms)


def _login(url: BrokerUrl, *, token: str | None, ca_file: str | None) -> Login:
    """A user without a password is a token, as in every client of NATS."""
    if url.user is not None and url.password is None:
        token, user = token or url.user, None
    else:
        user = url.user
    creds_file, nkey_file = url.file("creds_file"), url.file("nkey_file")
    if sum(login is not None for login in (user, token, creds_file, nkey_file)) > 1:
        raise ConfigurationError(
            "NATS knows one login: user and password, a token, creds_file or nkey_file; drop the others"
        )
    if url.password is not None and user is None:
        raise ConfigurationError("the URL of NATS has a password and no user; write nats://user:password@host")
    return Login(
        user=user,
        password=url.password,
        token=token,
        creds_file=_checked_creds(creds_file),
        nkey_file=_checked_seed(nkey_file),
        tls=tls_context(url, tls_schemes=TLS_SCHEMES, ca_file=ca_file),
        inbox_prefix=_subject(url, "inbox_prefix") or "_INBOX",
    )


def _subject(url: BrokerUrl, option: str) -> str:
    value = url.options.get(option, "")
    if value and not _SUBJECT.fullmatch(value):
        raise ConfigurationError(f"{option} in the broker's URL is a subject like shop.eu, not {value!r}")
    return value


def _checked_creds(path: str | None) -> str | None:
    """The client would look for the parts of the file for ever."""
    if path is not None and not all(part in _text_of(path, "creds_file") for part in _CREDS_PARTS):
        raise ConfigurationError(
            "creds_file in the broker's URL holds no user's JWT and seed; make one with `nsc generate creds`"
        )
    return path


def _checked_seed(path: str | None) -> str | None:
    if path is not None:
        try:
            from_seed(bytearray(_text_of(path, "nkey_file").strip(), "ascii"))
        except (NkeysError, ValueError) as error:
            raise ConfigurationError(
                "nkey_file in the broker's URL holds no seed; make one with `nk -gen user`"
            ) from error
    return path


def _text_of(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option} in the broker's URL cannot be read: {error}") from error
