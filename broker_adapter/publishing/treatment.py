"""The treatments of messages after an engine's error, as each adapter's table of errors assigns them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Treatment(StrEnum):
    """The treatment of a message or a batch that an engine answered with an error."""

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


ONE_MESSAGE: Final = frozenset({Treatment.REJECTED, Treatment.DEFERRED})
"""What concerns one message: it was not stored, and others may be taken. All else concerns the whole batch."""


def treatments_by_name(names: Mapping[Treatment, str]) -> dict[str, Treatment]:
    """Returns an adapter's table by the name of a code; `names`: the codes of each treatment, with spaces between."""
    return {name: treatment for treatment, some in names.items() for name in some.split()}
