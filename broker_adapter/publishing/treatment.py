"""The treatments of messages after an engine's error, which each adapter's table assigns, and what they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed
from outbox_core.messages.message import Message, PublishResult, PublishStatus


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
    """The login may not do this."""
    OUTAGE = "outage"
    """BrokerUnavailable: anything may have been stored."""


ONE_MESSAGE: Final = frozenset({Treatment.REJECTED, Treatment.DEFERRED})
"""What concerns one message: it was not stored, and others may be taken. All else concerns the whole batch."""


_RAISED: Final[Mapping[Treatment, type[BrokerError]]] = {
    Treatment.STORAGE: StorageFailed,
    Treatment.NOT_AUTHENTICATED: NotAuthenticated,
    Treatment.NOT_AUTHORIZED: NotAuthorized,
}


def batch_error(treatment: Treatment, text: str) -> BrokerError:
    """Returns the exception for a whole batch. There, what concerns one message is an outage."""
    return _RAISED.get(treatment, BrokerUnavailable)(text)


def refused_result(message: Message, treatment: Treatment, reason: str) -> PublishResult:
    """Returns the result of a message that was not stored."""
    status = PublishStatus.REJECTED if treatment is Treatment.REJECTED else PublishStatus.DEFERRED
    return PublishResult(message.id, status, f"topic {message.topic}: {reason}")


def treatments_by_name(names: Mapping[Treatment, str]) -> dict[str, Treatment]:
    """Returns an adapter's table by the name of a code; `names`: the codes of each treatment, with spaces between."""
    return {name: treatment for treatment, some in names.items() for name in some.split()}
