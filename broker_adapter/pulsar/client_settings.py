"""Translates a broker's URL to the settings of Pulsar's client and of its admin API, and checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from broker_adapter.publishing.admin_http import admin_url, check_login_encrypted
from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError

URL_OPTIONS: Final = frozenset({"admin"})
TLS_SCHEME: Final = "pulsar+ssl"
TENANT_DEFAULT: Final = "public"
NAMESPACE_DEFAULT: Final = "default"
PORT_ADMIN: Final = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Secrets are not shown by repr()."""

    service_url: str
    addresses: str
    """The servers' addresses, for messages."""
    namespace: str
    """`tenant/namespace`: where topics are."""
    timeout_ms: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    admin_url: str | None = None
    has_tls: bool = False
    """Whether the broker gets the login by TLS."""

    @classmethod
    def of(cls, url: BrokerUrl, *, timeout_ms: int, token: str | None = None, ca_file: str | None = None) -> Self:
        """Raises ConfigurationError for options that contradict each other."""
        if url.user and token:
            raise ConfigurationError("a token and a user were given, and Pulsar takes one of them: leave one out")
        if url.user and not url.password:
            raise ConfigurationError("a user needs a password: pulsar://user:password@host:6650, or password_file=")
        if any(":" in host for host, _ in url.hosts):
            raise ConfigurationError(f"Pulsar's client knows no IPv6 addresses: name the hosts of {url.addresses}")
        ca_file, cert_file, key_file = ca_file or url.file("ca_file"), url.file("cert_file"), url.file("key_file")
        if (cert_file is None) != (key_file is None):
            raise ConfigurationError("cert_file and key_file in the broker's URL belong together: give both")
        admin = url.options.get("admin")
        if admin is not None:
            admin = admin_url(admin, option="admin", port=PORT_ADMIN)
            if url.scheme == TLS_SCHEME and (token or url.password):
                check_login_encrypted(admin, option="admin")
        has_tls = url.scheme == TLS_SCHEME or str(admin).startswith("https:")
        if (ca_file or cert_file) and not has_tls:
            raise ConfigurationError(f"ca_file, cert_file and key_file need TLS: write {TLS_SCHEME}://")
        return cls(
            service_url=f"{url.scheme}://{url.addresses}",
            addresses=url.addresses,
            namespace=_namespace(url.path),
            timeout_ms=timeout_ms,
            user=url.user,
            password=url.password if url.user else None,
            token=token or (None if url.user else url.password),
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            admin_url=admin,
            has_tls=url.scheme == TLS_SCHEME,
        )

    def topic_url(self, topic: str) -> str:
        """The full name of a topic. It is persistent always: what others hold is in memory alone."""
        return f"persistent://{self.namespace}/{topic}"


def _namespace(path: str) -> str:
    parts = path.strip("/").split("/") if path.strip("/") else [TENANT_DEFAULT, NAMESPACE_DEFAULT]
    if len(parts) != len((TENANT_DEFAULT, NAMESPACE_DEFAULT)) or not all(parts):
        raise ConfigurationError(f"the path of a pulsar URL is /TENANT/NAMESPACE or nothing, not /{path}")
    return "/".join(parts)
