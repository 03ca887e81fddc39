"""Maps errors of JetStream and of its client to treatments of messages: the adapter's only table of them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

import msgspec
from nats import errors as client

from broker_adapter.publishing.treatment import Treatment
from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotAuthenticated, OutboxError


class ApiError(msgspec.Struct, frozen=True):
    """An error as JetStream answers it: a class as of HTTP, its own number, and a text."""

    code: int = 0
    err_code: int = 0
    description: str = ""


STORE_FAILED: Final = 10077
"""The stream's store refused: its text alone says why."""

OF_CODES: Final[Mapping[int, Treatment]] = {
    10054: Treatment.REJECTED,  # message size exceeds maximum allowed
    10097: Treatment.REJECTED,  # header size exceeds maximum allowed of 64k
    10109: Treatment.DEFERRED,  # invalid operation on sealed stream
    10169: Treatment.DEFERRED,  # message counter increment is missing: the stream only counts
    10002: Treatment.STORAGE,  # resource limits exceeded for account
    10023: Treatment.STORAGE,  # insufficient resources
    10028: Treatment.STORAGE,  # insufficient memory resources available
    10047: Treatment.STORAGE,  # insufficient storage resources available
    10008: Treatment.OUTAGE,  # JetStream system temporarily unavailable
    10009: Treatment.OUTAGE,  # JetStream cluster can not handle request: no longer the leader
    10063: Treatment.OUTAGE,  # expected stream sequence does not match: the leader is about to change
    10118: Treatment.OUTAGE,  # stream is offline
    10158: Treatment.OUTAGE,  # duplicate message id is in process: its first copy is not stored yet
    10167: Treatment.OUTAGE,  # too many requests
    10194: Treatment.OUTAGE,  # stream is offline: {err}
}
"""JetStream's error numbers that a publish without headers of JetStream's own can get. OUTAGE: not now; it is published
again until the time-out.
"""

OF_STORE_TEXTS: Final[Mapping[str, Treatment]] = {
    "maximum messages exceeded": Treatment.DEFERRED,
    "maximum bytes exceeded": Treatment.DEFERRED,
    "maximum messages per subject exceeded": Treatment.DEFERRED,
    "message too large": Treatment.REJECTED,
    "store is closed": Treatment.OUTAGE,
}
"""Texts of STORE_FAILED; any other is the disk's."""

CURES: Final[Mapping[Treatment, str]] = {
    Treatment.REJECTED: "store the body elsewhere and publish a reference",
    Treatment.DEFERRED: "raise the limits of the stream (`nats stream edit`), or let its consumers catch up",
    Treatment.STORAGE: "make room for JetStream: max_file and max_mem of the server, or the limits of the account",
    Treatment.OUTAGE: "see `nats stream report`",
}

LOGIN_TEXTS: Final = (
    "authorization violation",
    "user authentication expired",
    "user authentication revoked",
    "account authentication expired",
)
"""In lower case: what a server says as it refuses a login. The client has a class for one of them, after connecting."""

OF_EXCEPTIONS: Final[tuple[tuple[type[BaseException], type[OutboxError]], ...]] = (
    (client.AuthorizationError, NotAuthenticated),
    (client.InvalidUserCredentialsError, ConfigurationError),
    (client.InvalidCallbackTypeError, ConfigurationError),
    (client.BadTimeoutError, ConfigurationError),
    (client.Error, BrokerUnavailable),
    (ssl.SSLError, BrokerUnavailable),
    (OSError, BrokerUnavailable),
    (TimeoutError, BrokerUnavailable),
)
"""Exceptions of the client, subclasses first."""


def treatment_of(error: ApiError) -> Treatment:
    """Returns the treatment of an answer. Of codes that are not in the table, 4xx, which no retry cures, are deferred,
    so that an operator sees them and nothing is parked; failures of the server (429, 5xx) are retried.
    """
    if error.err_code == STORE_FAILED:
        return OF_STORE_TEXTS.get(error.description, Treatment.STORAGE)
    treatment = OF_CODES.get(error.err_code)
    if treatment is not None:
        return treatment
    return Treatment.DEFERRED if 400 <= error.code < 500 and error.code != 429 else Treatment.OUTAGE


def exception_for(error: BaseException, *, what: str) -> OutboxError:
    """The error that an exception of the client stands for. The text says what was tried, and no secret."""
    text = str(error).removeprefix("nats: ") or type(error).__name__
    if any(login_text in text.lower() for login_text in LOGIN_TEXTS):
        return NotAuthenticated(f"{what}: the server refuses the login ({text}); correct user, password or token")
    kind = next(
        (kind for exception_type, kind in OF_EXCEPTIONS if isinstance(error, exception_type)), BrokerUnavailable
    )
    return kind(f"{what}: {text}")
