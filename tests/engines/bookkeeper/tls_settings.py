"""Settings with which bookies and ZooKeeper demand certificates and logins."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.fixtures.certificate_authority import Authority, Certificate

ROLE: Final = "nodes"
UNIT: Final = f"0:{ROLE}"
"""Where BookKeeper finds a role in a certificate."""
USER: Final = "outbox"
PASSWORD: Final = 'a "quoted" \\ password'


def bookie_settings(authority: Authority, certificate: Certificate) -> dict[str, object]:
    """A bookie that serves clients only by TLS, and only those whose certificate has the role."""
    return {
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory", "tlsProvider": "JDK",
        "tlsKeyStoreType": "PEM", "tlsKeyStore": certificate.key, "tlsCertificatePath": certificate.certificate,
        "tlsTrustStoreType": "PEM", "tlsTrustStore": authority.file, "tlsClientAuthentication": "true",
        "bookieAuthProviderFactoryClass": "org.apache.bookkeeper.tls.BookieAuthZFactory", "authorizedRoles": ROLE,
    }  # fmt: skip


def zookeeper_settings(authority: Authority, certificate: Certificate, *, port: int) -> dict[str, object]:
    """A second port, by TLS with client certificates; SASL on both ports."""
    return {
        "secureClientPort": port, "secureClientPortAddress": certificate.certificate.stem,
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": certificate.both, "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": authority.file, "ssl.trustStore.type": "PEM",
        "authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    }  # fmt: skip


def zookeeper_login_option(file: Path) -> str:
    """The JVM option of a ZooKeeper server that knows the user."""
    password = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    file.write_text(
        f'Server {{ org.apache.zookeeper.server.auth.DigestLoginModule required user_{USER}="{password}"; }};\n'
    )
    return f"-Djava.security.auth.login.config={file}"
