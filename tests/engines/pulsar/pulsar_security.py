"""Logins by token and TLS of a Pulsar server of the tests' own, which makes its tokens itself."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from typing import Final

from outbox_broker.http.server import Tls

ADMIN: Final = "admin"
CERTIFIED: Final = "outbox-mq test"
"""The user whom a certificate names."""
NAMED: Final = "named"
PASSWORD: Final = "right-password"
_PASSWORD_LINE: Final = f"{NAMED}:$apr1$outboxmq$hsNhbMgK.oxsVCfdwJfLY/\n"
"""As `htpasswd` writes it for PASSWORD."""
_PREFIX: Final = "org.apache.pulsar"
_PROVIDERS: Final = f"{_PREFIX}.broker.authentication.AuthenticationProvider"


class PulsarSecurity:
    """A server that knows each user by a token, one by its own certificate, one by a password, and encrypts on ports of
    its own.
    """

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._secret = secrets.token_bytes(32)

    def token(self, user: str) -> str:
        """A JSON Web Token (RFC 7519) with the user as its subject, signed by HMAC-SHA256."""
        return signed_token(user, self._secret)

    def settings(self) -> dict[str, object]:
        """Of standalone.conf."""
        return {
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": ",".join(f"{_PROVIDERS}{kind}" for kind in ("Token", "Tls", "Basic")),
            "basicAuthConf": f"data:;base64,{base64.b64encode(_PASSWORD_LINE.encode()).decode()}",
            "tlsTrustCertsFilePath": self.tls.certificate,
            "tokenSecretKey": f"data:;base64,{base64.b64encode(self._secret).decode()}",
            "superUserRoles": ADMIN,
            "brokerClientAuthenticationPlugin": f"{_PREFIX}.client.impl.auth.AuthenticationToken",
            "brokerClientAuthenticationParameters": f"token:{self.token(ADMIN)}",
            "tlsCertificateFilePath": self.tls.certificate,
            "tlsKeyFilePath": self.tls.key,
        }


def signed_token(user: str, secret: bytes) -> str:
    """A token of whoever knows the secret."""
    parts = b".".join(_encoded(json.dumps(part).encode()) for part in ({"alg": "HS256"}, {"sub": user}))
    return b".".join((parts, _encoded(hmac.digest(secret, parts, hashlib.sha256)))).decode()


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
