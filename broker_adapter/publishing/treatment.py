"""Treatment: what an engine's error means for the messages of a batch, as each adapter's table of errors says it."""

from __future__ import annotations

from enum import StrEnum


class Treatment(StrEnum):
    """What a code means for us."""

    REJECTED = "rejected"
    """This message can never be stored as it is."""
    DEFERRED = "deferred"
    """This message was not stored; an operator can help."""
    STORAGE = "storage"
    """StorageFailed: the servers cannot make anything durable now."""
    NOT_AUTHENTICATED = "not_authenticated"
    """The login was refused."""
    NOT_AUTHORIZED = "not_authorized"
    """The login may not produce on this cluster."""
    OUTAGE = "outage"
    """BrokerUnavailable: anything may have been stored."""
