"""Maps AMQP's reply codes and the client's exceptions to treatments: the adapter's only table of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pika import exceptions as client
from pika import spec
from pika.adapters.utils import connection_workflow as workflow

from broker_adapter.publishing.treatment import Treatment, batch_error
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, StorageFailed

REPLY_CODES: Final[Mapping[int, Treatment]] = {
    spec.REPLY_SUCCESS: Treatment.OUTAGE,
    spec.CONTENT_TOO_LARGE: Treatment.REJECTED,
    spec.NO_ROUTE: Treatment.DEFERRED,
    spec.NO_CONSUMERS: Treatment.DEFERRED,
    spec.CONNECTION_FORCED: Treatment.OUTAGE,
    spec.INVALID_PATH: Treatment.NOT_AUTHORIZED,
    spec.ACCESS_REFUSED: Treatment.NOT_AUTHORIZED,
    spec.NOT_FOUND: Treatment.DEFERRED,
    spec.RESOURCE_LOCKED: Treatment.DEFERRED,
    spec.PRECONDITION_FAILED: Treatment.REJECTED,  # the message's size, or a property or header of a wrong type
    spec.FRAME_ERROR: Treatment.OUTAGE,
    spec.SYNTAX_ERROR: Treatment.OUTAGE,
    spec.COMMAND_INVALID: Treatment.OUTAGE,
    spec.CHANNEL_ERROR: Treatment.OUTAGE,
    spec.UNEXPECTED_FRAME: Treatment.OUTAGE,
    spec.RESOURCE_ERROR: Treatment.STORAGE,
    spec.NOT_ALLOWED: Treatment.NOT_AUTHORIZED,
    spec.NOT_IMPLEMENTED: Treatment.OUTAGE,
    spec.INTERNAL_ERROR: Treatment.OUTAGE,
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
    spec.ACCESS_REFUSED: "rabbitmqctl set_permissions -p VHOST USER CONFIGURE WRITE READ",
    spec.NOT_ALLOWED: "correct the virtual host in the broker's URL, or rabbitmqctl set_permissions -p VHOST USER",
}
_SIZE: Final = "message size"
_SIZE_CURE: Final = "store the body elsewhere and publish a reference, or raise max_message_size"
NACK_CURE: Final = "it is full (x-overflow reject-publish): let its consumers catch up, or raise x-max-length"

_EXCEPTION_CURES: Final[Mapping[type[Exception], str]] = {
    client.ConnectionBlockedTimeout: "a resource alarm blocks all publishers: make room on the server's disk or memory",
    client.IncompatibleProtocolError: "the port is not AMQP's, or TLS differs: rabbitmqs://, cert_file, key_file",
}
_PROBABLE: Final = (client.ProbableAuthenticationError, client.ProbableAccessDeniedError)
"""The client's guesses, right only where the server closed with a code, which their text has."""
_CODE_IN_TEXT: Final = re.compile(r"ConnectionClosedByBroker: \((\d+)\) (.*)")


def treatment_of(code: int) -> Treatment:
    """Returns the treatment of a reply. An unknown code is an outage, which costs no attempt."""
    return REPLY_CODES.get(code, Treatment.OUTAGE)


def explained(code: int, text: str) -> str:
    """The server's words, the code and the cure."""
    cure = _SIZE_CURE if code == spec.PRECONDITION_FAILED and _SIZE in text else CURES.get(code)
    return f"{text} ({code}); {cure}" if cure else f"{text} ({code})"


def exception_for(error: BaseException, *, addresses: str) -> BrokerError:
    """The error of ours that an exception of the client's stands for; `addresses`: those asked, no secret."""
    causes = _causes(error)
    of_each = [_exception_for(cause, addresses=addresses) for cause in causes]
    return next((translated for translated in of_each if not isinstance(translated, BrokerUnavailable)), of_each[-1])


def _exception_for(error: BaseException, *, addresses: str) -> BrokerError:
    code, text = _reply(error)
    if code is None:
        kind = next((kind for client_error, kind in EXCEPTIONS if isinstance(error, client_error)), BrokerUnavailable)
        cure = _EXCEPTION_CURES.get(type(error))  # type: ignore[arg-type]
        return kind(f"RabbitMQ at {addresses}: {text}; {cure}" if cure else f"RabbitMQ at {addresses}: {text}")
    if isinstance(error, client.ProbableAuthenticationError):
        return NotAuthenticated(
            f"RabbitMQ at {addresses}: {text} ({code}); correct user or password in the broker's URL"
        )
    return exception_for_code(code, text, addresses=addresses)


def exception_for_code(code: int, text: str, *, addresses: str) -> BrokerError:
    """The error of ours for what concerns more than one message."""
    return batch_error(treatment_of(code), f"RabbitMQ at {addresses}: {explained(code, text)}")


def _reply(error: BaseException) -> tuple[int | None, str]:
    """The code and the words of a server that closed; no code where it did not."""
    if isinstance(error, client.ConnectionClosed | client.ChannelClosed):
        return error.reply_code, error.reply_text
    if isinstance(error, _PROBABLE):
        code_match = _CODE_IN_TEXT.search(str(error.args[0]))
        if code_match is not None:
            return int(code_match[1]), code_match[2].strip("'\"")
    return None, str(error) or repr(error)


def _causes(error: BaseException) -> list[BaseException]:
    """Why each server could not be reached, where the error is of several; else the error."""
    if isinstance(error, workflow.AMQPConnectionWorkflowFailed):
        return [cause for server_error in error.exceptions for cause in _causes(server_error)] or [error]
    if isinstance(error, workflow.AMQPConnectorPhaseErrorBase):
        return _causes(error.exception)
    return [error]
