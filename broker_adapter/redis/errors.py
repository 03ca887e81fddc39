"""Maps errors of Redis and of its client to treatments of messages: the adapter's only table of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import redis.exceptions as client

from broker_adapter.publishing.treatment import Treatment, batch_error
from outbox_core.common.errors import BrokerError

OWN_CODE_NO_STREAM: Final = "NOSTREAM"
"""What append.lua answers where `?create=false` and the stream is not there."""

CODES: Final[Mapping[str, Treatment]] = {
    "OOM": Treatment.STORAGE,
    "MISCONF": Treatment.STORAGE,
    "READONLY": Treatment.OUTAGE,
    "LOADING": Treatment.OUTAGE,
    "BUSY": Treatment.OUTAGE,
    "MASTERDOWN": Treatment.OUTAGE,
    "NOMASTERLINK": Treatment.OUTAGE,
    "NOREPLICAS": Treatment.OUTAGE,
    "CLUSTERDOWN": Treatment.OUTAGE,
    "TRYAGAIN": Treatment.OUTAGE,
    "MOVED": Treatment.OUTAGE,
    "ASK": Treatment.OUTAGE,
    "REDIRECT": Treatment.OUTAGE,
    "UNBLOCKED": Treatment.OUTAGE,
    "IOERR": Treatment.OUTAGE,
    "NOSCRIPT": Treatment.OUTAGE,  # nothing was done: the script is sent whole
    "NOAUTH": Treatment.NOT_AUTHENTICATED,
    "WRONGPASS": Treatment.NOT_AUTHENTICATED,
    "DENIED": Treatment.NOT_AUTHENTICATED,
    "NOPERM": Treatment.NOT_AUTHORIZED,
    "WRONGTYPE": Treatment.DEFERRED,
    OWN_CODE_NO_STREAM: Treatment.DEFERRED,
    "ERR": Treatment.DEFERRED,
    # Answers to commands that this adapter does not send.
    "BUSYGROUP": Treatment.DEFERRED,
    "BUSYKEY": Treatment.DEFERRED,
    "CROSSSLOT": Treatment.DEFERRED,
    "EXECABORT": Treatment.DEFERRED,
    "INPROG": Treatment.DEFERRED,
    "INVALIDOBJ": Treatment.DEFERRED,
    "NOGOODPRIMARY": Treatment.DEFERRED,
    "NOGOODSLAVE": Treatment.DEFERRED,
    "NOGROUP": Treatment.DEFERRED,
    "NOPROTO": Treatment.DEFERRED,
    "NOQUORUM": Treatment.DEFERRED,
    "NOTBUSY": Treatment.DEFERRED,
    "UNKILLABLE": Treatment.DEFERRED,
}
"""The first word of an error of the server's; a test keeps the table complete."""

EXCEPTIONS: Final[tuple[tuple[type[Exception], Treatment], ...]] = (
    (client.AuthenticationError, Treatment.NOT_AUTHENTICATED),
    (client.AuthorizationError, Treatment.NOT_AUTHENTICATED),
    (client.ExternalAuthProviderError, Treatment.NOT_AUTHENTICATED),
    (client.ConnectionError, Treatment.OUTAGE),
    (client.TimeoutError, Treatment.OUTAGE),
    (client.RedisClusterException, Treatment.OUTAGE),
    (client.RedisError, Treatment.OUTAGE),
    (client.ChildDeadlockedError, Treatment.OUTAGE),
)
"""Errors of the client that are no answer of the server's, subclasses first."""

CLIENT_ERRORS: Final = (client.RedisError, client.RedisClusterException, client.ChildDeadlockedError)
"""What the client raises."""

_CURES: Final[Mapping[str, str]] = {
    "OOM": "raise maxmemory, or let consumers trim the streams, or give ?maxlen=",
    "MISCONF": "see the server's log; its disk is full or cannot be written",
    "READONLY": "the URL names a replica: name the master, or the Sentinels that know it (redis+sentinel://)",
    "NOREPLICAS": "too few replicas are in step for min-replicas-to-write: start them",
    "CLUSTERDOWN": "a master is down, this node is cut off from most masters, or its clock was set back: start or "
    "reconnect them, set the clock right",
    "MOVED": "the server is part of a cluster: use redis+cluster://",
    "NOAUTH": "give a user and a password in the broker's URL, or a ?password_file=",
    "WRONGPASS": "correct the user or the password: in the file of ?password_file=, which each new connection reads, "
    "or in the URL, and restart",
    "DENIED": "the server is in protected mode: set a password, or bind and protected-mode no",
    "NOPERM": "allow the user that command, or the keys of ?prefix=, by ACL SETUSER on every node",
    "WRONGTYPE": "the topic's keys hold something else: remove that, or choose other keys by ?prefix=",
    "Timeout": "no answer in time: see whether the server hangs, or is cut off",
    OWN_CODE_NO_STREAM: "make it by XADD or XGROUP CREATE MKSTREAM, or leave out ?create=false",
}


def code_of(error: Exception) -> str:
    """The first word of the server's answer; the client takes those that it knows off the text."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, str) else str(error).partition(" ")[0]


def treatment_of(error: Exception) -> Treatment:
    """Returns the treatment of a client's exception; an unknown code of the server is for an operator."""
    if isinstance(error, client.RedisClusterException) and isinstance(error.__cause__, client.RedisError):
        return treatment_of(error.__cause__)  # of the last node that was asked for the cluster's slots
    if isinstance(error, client.ResponseError):
        return CODES.get(code_of(error), Treatment.DEFERRED)
    return next(treatment for kind, treatment in EXCEPTIONS if isinstance(error, kind))


def description_of(error: Exception) -> str:
    """The server's words and the cure."""
    code, text = code_of(error), str(error)
    shown = text if text.startswith(code) or not isinstance(error, client.RedisError) else f"{code} {text}"
    cure = _CURES.get(code)
    return f"{shown}; {cure}" if cure else shown


def exception_for(error: Exception, *, addresses: str) -> BrokerError:
    """The error of ours that an exception of the client's stands for; `addresses`: those asked."""
    return batch_error(treatment_of(error), f"Redis at {addresses}: {description_of(error)}")
