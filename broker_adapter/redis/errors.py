"""Maps errors of Redis and of its client to meanings: the adapter's only table of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import redis.exceptions as client

from outbox_core.common.errors import (
    BrokerError,
    BrokerUnavailable,
    NotAuthenticated,
    NotAuthorized,
    StorageFailed,
)


class Meaning(StrEnum):
    """The meaning of an error for the messages that were to be appended."""

    DEFERRED = "deferred"
    """Not these messages, until an operator has helped."""
    OUTAGE = "outage"
    """Nothing now, or from another node: in doubt."""
    STORAGE = "storage"
    """The server cannot store now."""
    UNAUTHENTICATED = "unauthenticated"
    UNAUTHORIZED = "unauthorized"
    SCRIPT_UNKNOWN = "script unknown"
    """Nothing was done: load the script, and repeat."""


OWN_CODE_NO_STREAM: Final = "NOSTREAM"
"""What append.lua answers where `?create=false` and the stream is not there."""

CODES: Final[Mapping[str, Meaning]] = {
    "OOM": Meaning.STORAGE,
    "MISCONF": Meaning.STORAGE,
    "READONLY": Meaning.OUTAGE,
    "LOADING": Meaning.OUTAGE,
    "BUSY": Meaning.OUTAGE,
    "MASTERDOWN": Meaning.OUTAGE,
    "NOMASTERLINK": Meaning.OUTAGE,
    "NOREPLICAS": Meaning.OUTAGE,
    "CLUSTERDOWN": Meaning.OUTAGE,
    "TRYAGAIN": Meaning.OUTAGE,
    "MOVED": Meaning.OUTAGE,
    "ASK": Meaning.OUTAGE,
    "UNBLOCKED": Meaning.OUTAGE,
    "IOERR": Meaning.OUTAGE,
    "NOSCRIPT": Meaning.SCRIPT_UNKNOWN,
    "NOAUTH": Meaning.UNAUTHENTICATED,
    "WRONGPASS": Meaning.UNAUTHENTICATED,
    "DENIED": Meaning.UNAUTHENTICATED,
    "NOPERM": Meaning.UNAUTHORIZED,
    "WRONGTYPE": Meaning.DEFERRED,
    OWN_CODE_NO_STREAM: Meaning.DEFERRED,
    "ERR": Meaning.DEFERRED,
    # Answers to commands that this adapter does not send.
    "BUSYGROUP": Meaning.DEFERRED,
    "BUSYKEY": Meaning.DEFERRED,
    "CROSSSLOT": Meaning.DEFERRED,
    "EXECABORT": Meaning.DEFERRED,
    "INPROG": Meaning.DEFERRED,
    "INVALIDOBJ": Meaning.DEFERRED,
    "NOGOODSLAVE": Meaning.DEFERRED,
    "NOGROUP": Meaning.DEFERRED,
    "NOPROTO": Meaning.DEFERRED,
    "NOQUORUM": Meaning.DEFERRED,
    "NOTBUSY": Meaning.DEFERRED,
    "UNKILLABLE": Meaning.DEFERRED,
}
"""The first word of an error of the server's; a test keeps the table complete."""

EXCEPTIONS: Final[tuple[tuple[type[Exception], Meaning], ...]] = (
    (client.AuthenticationError, Meaning.UNAUTHENTICATED),
    (client.AuthorizationError, Meaning.UNAUTHENTICATED),
    (client.ExternalAuthProviderError, Meaning.UNAUTHENTICATED),
    (client.ConnectionError, Meaning.OUTAGE),
    (client.TimeoutError, Meaning.OUTAGE),
    (client.RedisClusterException, Meaning.OUTAGE),
    (client.RedisError, Meaning.OUTAGE),
    (client.ChildDeadlockedError, Meaning.OUTAGE),
)
"""Errors of the client that are no answer of the server's, subclasses first."""

CLIENT_ERRORS: Final = (client.RedisError, client.RedisClusterException, client.ChildDeadlockedError)
"""What the client raises."""

_CURES: Final[Mapping[str, str]] = {
    "OOM": "raise maxmemory, or let consumers trim the streams, or give ?maxlen=",
    "MISCONF": "see the server's log; its disk is full or cannot be written",
    "READONLY": "the URL names a replica: name the master",
    "NOREPLICAS": "too few replicas are in step for min-replicas-to-write: start them",
    "CLUSTERDOWN": "a master is down, or this node is cut off from most masters: start or reconnect them",
    "MOVED": "the server is part of a cluster: use redis+cluster://",
    "NOAUTH": "give a user and a password in the broker's URL",
    "WRONGPASS": "correct the user or the password in the broker's URL",
    "DENIED": "the server is in protected mode: set a password, or bind and protected-mode no",
    "NOPERM": "allow the user that command, or the keys of ?prefix=, by ACL SETUSER on every node",
    "WRONGTYPE": "the topic's keys hold something else: remove that, or choose other keys by ?prefix=",
    OWN_CODE_NO_STREAM: "make it by XADD or XGROUP CREATE MKSTREAM, or leave out ?create=false",
}

_RAISED: Final[Mapping[Meaning, type[BrokerError]]] = {
    Meaning.OUTAGE: BrokerUnavailable,
    Meaning.SCRIPT_UNKNOWN: BrokerUnavailable,
    Meaning.STORAGE: StorageFailed,
    Meaning.UNAUTHENTICATED: NotAuthenticated,
    Meaning.UNAUTHORIZED: NotAuthorized,
    Meaning.DEFERRED: BrokerUnavailable,
}
"""How an error that concerns more than the messages of one topic is raised."""


def code_of(error: Exception) -> str:
    """The first word of the server's answer; the client takes those that it knows off the text."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, str) else str(error).partition(" ")[0]


def meaning_of(error: Exception) -> Meaning:
    """Returns the meaning of a client's exception; an unknown code of the server is for an operator."""
    if isinstance(error, client.RedisClusterException) and isinstance(error.__cause__, client.RedisError):
        return meaning_of(error.__cause__)  # of the last node that was asked for the cluster's slots
    if isinstance(error, client.ResponseError):
        return CODES.get(code_of(error), Meaning.DEFERRED)
    return next(meaning for kind, meaning in EXCEPTIONS if isinstance(error, kind))


def description_of(error: Exception) -> str:
    """The server's words and the cure."""
    code, text = code_of(error), str(error)
    shown = text if text.startswith(code) or not isinstance(error, client.RedisError) else f"{code} {text}"
    cure = _CURES.get(code)
    return f"{shown}; {cure}" if cure else shown


def raised_for(error: Exception, *, place: str) -> BrokerError:
    """The error of ours that an exception of the client's stands for; `place`: the addresses asked."""
    return _RAISED[meaning_of(error)](f"Redis at {place}: {description_of(error)}")
