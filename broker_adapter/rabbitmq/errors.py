"""Maps AMQP's reply codes and the client's exceptions to treatments: the adapter's only table of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from pika import exceptions as client
from pika import spec
from pika.adapters.utils import connection_workflow as workflow

from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed


class RabbitMqErrorClass(StrEnum):
    """The meaning of a reply code for the message that it answers, or the connection that it ends."""

    REJECTED = "rejected"
    """This message can never be stored as it is."""
    DEFERRED = "deferred"
    """Not this message, until an operator has helped."""
    NOT_AUTHORIZED = "not authorized"
    """This user may not do it."""
    STORAGE = "storage"
    """The server cannot store anything now."""
    OUTAGE = "outage"
    """Anything may have been stored."""


REPLY_CODES: Final[Mapping[int, RabbitMqErrorClass]] = {
    spec.REPLY_SUCCESS: RabbitMqErrorClass.OUTAGE,
    spec.CONTENT_TOO_LARGE: RabbitMqErrorClass.REJECTED,
    spec.NO_ROUTE: RabbitMqErrorClass.DEFERRED,
    spec.NO_CONSUMERS: RabbitMqErrorClass.DEFERRED,
    spec.CONNECTION_FORCED: RabbitMqErrorClass.OUTAGE,
    spec.INVALID_PATH: RabbitMqErrorClass.NOT_AUTHORIZED,
    spec.ACCESS_REFUSED: RabbitMqErrorClass.NOT_AUTHORIZED,
    spec.NOT_FOUND: RabbitMqErrorClass.DEFERRED,
    spec.RESOURCE_LOCKED: RabbitMqErrorClass.DEFERRED,
    spec.PRECONDITION_FAILED: RabbitMqErrorClass.DEFERRED,  # unless it is about the message's size
    spec.FRAME_ERROR: RabbitMqErrorClass.OUTAGE,
    spec.SYNTAX_ERROR: RabbitMqErrorClass.OUTAGE,
    spec.COMMAND_INVALID: RabbitMqErrorClass.OUTAGE,
    spec.CHANNEL_ERROR: RabbitMqErrorClass.OUTAGE,
    spec.UNEXPECTED_FRAME: RabbitMqErrorClass.OUTAGE,
    spec.RESOURCE_ERROR: RabbitMqErrorClass.STORAGE,
    spec.NOT_ALLOWED: RabbitMqErrorClass.NOT_AUTHORIZED,
    spec.NOT_IMPLEMENTED: RabbitMqErrorClass.OUTAGE,
    spec.INTERNAL_ERROR: RabbitMqErrorClass.OUTAGE,
}
"""All of AMQP 0.9.1, with which a server returns a message, or ends a channel or a connection."""

EXCEPTIONS: Final[tuple[tuple[type[Exception], type[BrokerError]], ...]] = (
    (client.AuthenticationError, NotAuthenticated),
    (client.ConnectionBlockedTimeout, StorageFailed),
    (client.AMQPError, BrokerUnavailable),
    (client.ChannelError, BrokerUnavailable),
    (client.ReentrancyError, BrokerUnavailable),
    (workflow.AMQPConnectorException, BrokerUnavailable),
    (OSError, BrokerUnavailable),
    (TimeoutError, BrokerUnavailable),
)
"""Exceptions that carry no reply code, subclasses first."""

CLIENT_ERRORS: Final = tuple(kind for kind, _ in EXCEPTIONS)
"""What the client raises."""

CURES: Final[Mapping[int, str]] = {
    spec.NO_ROUTE: "declare a queue of this name, or bind one to the exchange of the broker's URL",
    spec.NOT_FOUND: "declare the exchange that the broker's URL names",
    spec.PRECONDITION_FAILED: "store the body elsewhere and publish a reference, or raise max_message_size",
    spec.ACCESS_REFUSED: "rabbitmqctl set_permissions -p VHOST USER CONFIGURE WRITE READ",
    spec.NOT_ALLOWED: "correct the virtual host in the broker's URL, or rabbitmqctl set_permissions -p VHOST USER",
}
NACK_CURE: Final = "it is full (x-overflow reject-publish): let its consumers catch up, or raise x-max-length"

_EXCEPTION_CURES: Final[Mapping[type[Exception], str]] = {
    client.ConnectionBlockedTimeout: "a resource alarm blocks all publishers: make room on the server's disk or memory",
    client.IncompatibleProtocolError: "the port is not AMQP's, or TLS differs: rabbitmqs://, cert_file, key_file",
}
_PROBABLE: Final = (client.ProbableAuthenticationError, client.ProbableAccessDeniedError)
"""The client's guesses, right only where the server closed with a code, which their text has."""
_CODE_IN_TEXT: Final = re.compile(r"ConnectionClosedByBroker: \((\d+)\) (.*)")


def verdict_of(code: int, text: str) -> RabbitMqErrorClass:
    """Returns the meaning of a reply. An unknown code is an outage, which costs no attempt."""
    if code == spec.PRECONDITION_FAILED and "message size" in text:
        return RabbitMqErrorClass.REJECTED
    return REPLY_CODES.get(code, RabbitMqErrorClass.OUTAGE)


def explained(code: int, text: str) -> str:
    """The server's words, the code and the cure."""
    cure = CURES.get(code)
    return f"{text} ({code}); {cure}" if cure else f"{text} ({code})"


def raised_for(error: BaseException, *, place: str) -> BrokerError:
    """The error of ours that an exception of the client's stands for; `place`: the addresses asked, no secret."""
    causes = _causes(error)
    of_each = [_raised_for(cause, place=place) for cause in causes]
    return next((one for one in of_each if not isinstance(one, BrokerUnavailable)), of_each[-1])


def _raised_for(error: BaseException, *, place: str) -> BrokerError:
    code, text = _reply(error)
    if code is None:
        kind = next((kind for known, kind in EXCEPTIONS if isinstance(error, known)), BrokerUnavailable)
        cure = _EXCEPTION_CURES.get(type(error))  # type: ignore[arg-type]
        return kind(f"RabbitMQ at {place}: {text}; {cure}" if cure else f"RabbitMQ at {place}: {text}")
    if isinstance(error, client.ProbableAuthenticationError):
        return NotAuthenticated(f"RabbitMQ at {place}: {text} ({code}); correct user or password in the broker's URL")
    return raised_for_code(code, text, place=place)


def raised_for_code(code: int, text: str, *, place: str) -> BrokerError:
    """The error of ours for what concerns more than one message."""
    explanation = f"RabbitMQ at {place}: {explained(code, text)}"
    match verdict_of(code, text):
        case RabbitMqErrorClass.NOT_AUTHORIZED:
            return NotAuthorized(explanation)
        case RabbitMqErrorClass.STORAGE:
            return StorageFailed(explanation)
        case _:
            return BrokerUnavailable(explanation)


def _reply(error: BaseException) -> tuple[int | None, str]:
    """The code and the words of a server that closed; no code where it did not."""
    if isinstance(error, client.ConnectionClosed | client.ChannelClosed):
        return error.reply_code, error.reply_text
    if isinstance(error, _PROBABLE):
        found = _CODE_IN_TEXT.search(str(error.args[0]))
        if found is not None:
            return int(found[1]), found[2].strip("'\"")
    return None, str(error) or repr(error)


def _causes(error: BaseException) -> list[BaseException]:
    """Why each server could not be reached, where the error is of several; else the error."""
    if isinstance(error, workflow.AMQPConnectionWorkflowFailed):
        return [cause for one in error.exceptions for cause in _causes(one)] or [error]
    if isinstance(error, workflow.AMQPConnectorPhaseErrorBase):
        return _causes(error.exception)
    return [error]
