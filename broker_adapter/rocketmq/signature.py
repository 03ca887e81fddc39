"""The metadata of a request to a RocketMQ proxy: who asks, and the signature of an access key's secret."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

PROTOCOL: Final = "v2"
CLIENT_VERSION: Final = "5.0.0"
"""Of RocketMQ's client protocol."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key and its secret."""

    access_key: str
    secret: str = field(repr=False)

    def signature(self, text: bytes) -> bytes:
        """HMAC-SHA1, as both of RocketMQ's protocols have it."""
        return hmac.digest(self.secret.encode(), text, hashlib.sha1)


def request_metadata(login: Credentials | None, *, client_id: str, now_ms: int) -> list[tuple[str, str]]:
    """Returns the headers of a request. The signature is of the time, which the server does not check."""
    time = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    metadata = [
        ("x-mq-client-id", client_id),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", PROTOCOL),
        ("x-mq-client-version", CLIENT_VERSION),
        ("x-mq-date-time", time),
    ]
    if login is not None:
        signature = login.signature(time.encode()).hex().upper()
        credential = f"Credential={login.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
        metadata.append(("authorization", f"MQv2-HMAC-SHA1 {credential}"))
    return metadata
