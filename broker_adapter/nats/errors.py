"""Maps errors of JetStream and of its client to treatments of messages: the adapter's only table of them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from nats import errors as client

from outbox_core.common.errors import BrokerUnavailable, ConfigurationError, NotAuthenticated, OutboxError


class NatsErrorClass(StrEnum):
    """The treatment of a message that JetStream answered with an error."""

    REJECTED = "rejected"
    """It can never be stored as it is."""
    DEFERRED = "deferred"
    """An operator can help this stream."""
    FULL = "full"
    """The server or the account cannot store anything now: the whole batch waits."""
    REPEAT = "repeat"
    """Not now: publish it again at once, and after the time-out it is an outage."""


class ApiError(msgspec.Struct, frozen=True):
    """An error as JetStream answers it: a class as of HTTP, its own number, and a text."""

    code: int = 0
    err_code: int = 0
    description: str = ""


STORE_FAILED: Final = 10077
"""The stream's store refused: its text alone says why."""

OF_CODES: Final[Mapping[int, NatsErrorClass]] = {
    10054: NatsErrorClass.REJECTED,  # message size exceeds maximum allowed
    10097: NatsErrorClass.REJECTED,  # header size exceeds maximum allowed of 64k
    10109: NatsErrorClass.DEFERRED,  # invalid operation on sealed stream
    10169: NatsErrorClass.DEFERRED,  # message counter increment is missing: the stream only counts
    10002: NatsErrorClass.FULL,  # resource limits exceeded for account
    10023: NatsErrorClass.FULL,  # insufficient resources
    10028: NatsErrorClass.FULL,  # insufficient memory resources available
    10047: NatsErrorClass.FULL,  # insufficient storage resources available
    10008: NatsErrorClass.REPEAT,  # JetStream system temporarily unavailable
    10009: NatsErrorClass.REPEAT,  # JetStream cluster can not handle request: no longer the leader
    10063: NatsErrorClass.REPEAT,  # expected stream sequence does not match: the leader is about to change
    10118: NatsErrorClass.REPEAT,  # stream is offline
    10158: NatsErrorClass.REPEAT,  # duplicate message id is in process: its first copy is not stored yet
    10167: NatsErrorClass.REPEAT,  # too many requests
    10194: NatsErrorClass.REPEAT,  # stream is offline: {err}
}
"""JetStream's error numbers that a publish without headers of JetStream's own can get."""

OF_STORE_TEXTS: Final[Mapping[str, NatsErrorClass]] = {
    "maximum messages exceeded": NatsErrorClass.DEFERRED,
    "maximum bytes exceeded": NatsErrorClass.DEFERRED,
    "maximum messages per subject exceeded": NatsErrorClass.DEFERRED,
    "message too large": NatsErrorClass.REJECTED,
    "store is closed": NatsErrorClass.REPEAT,
}
"""Texts of STORE_FAILED; any other is the disk's, and means FULL."""

CURES: Final[Mapping[NatsErrorClass, str]] = {
    NatsErrorClass.REJECTED: "store the body elsewhere and publish a reference",
    NatsErrorClass.DEFERRED: "raise the limits of the stream (`nats stream edit`), or let its consumers catch up",
    NatsErrorClass.FULL: "make room for JetStream: max_file and max_mem of the server, or the limits of the account",
    NatsErrorClass.REPEAT: "see `nats stream report`",
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


def verdict_of(error: ApiError) -> NatsErrorClass:
    """Returns the treatment of an answer. Of codes that are not in the table, 4xx, which no retry cures, are deferred,
    so that an operator sees them and nothing is parked; failures of the server (429, 5xx) are retried.
    """
    if error.err_code == STORE_FAILED:
        return OF_STORE_TEXTS.get(error.description, NatsErrorClass.FULL)
    known = OF_CODES.get(error.err_code)
    if known is not None:
        return known
    return NatsErrorClass.DEFERRED if 400 <= error.code < 500 and error.code != 429 else NatsErrorClass.REPEAT


def of_exception(error: BaseException, *, what: str) -> OutboxError:
    """The error that an exception of the client stands for. The text says what was tried, and no secret."""
    text = str(error).removeprefix("nats: ") or type(error).__name__
    if any(one in text.lower() for one in LOGIN_TEXTS):
        return NotAuthenticated(f"{what}: the server refuses the login ({text}); correct user, password or token")
    kind = next((kind for known, kind in OF_EXCEPTIONS if isinstance(error, known)), BrokerUnavailable)
    return kind(f"{what}: {text}")
