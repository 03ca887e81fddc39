"""The table of errors is complete over AMQP's reply codes and the client's exceptions."""

from __future__ import annotations

import inspect
import ssl
from typing import Any

import pika.exceptions
import pytest
from pika import spec
from pika.adapters.utils import connection_workflow as workflow

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.rabbitmq.errors import CLIENT_ERRORS, REPLY_CODES, exception_for, explained, treatment_of
from outbox_core.common.errors import (
    BrokerError,
    BrokerUnavailable,
    NotAuthenticated,
    NotAuthorized,
    StorageFailed,
)

PLACE = "mq1:5672"
OF_AMQP = {200, 311, 312, 313, 320, 402, 403, 404, 405, 406, 501, 502, 503, 504, 505, 506, 530, 540, 541}
"""The constants of the classes `reply-success`, `soft-error` and `hard-error` in AMQP 0.9.1, with RabbitMQ's 312."""


def test_every_reply_code_of_the_protocol_and_of_the_client_is_in_the_table() -> None:
    of_client = {
        value for name, value in vars(spec).items() if type(value) is int and 200 <= value < 600 and name.isupper()
    }

    assert set(REPLY_CODES) == OF_AMQP
    assert {one for one in of_client if one != spec.FRAME_END} == OF_AMQP


def test_only_what_a_server_says_of_a_message_parks_it() -> None:
    rejected = {code for code in OF_AMQP if treatment_of(code) is Treatment.REJECTED}

    assert rejected == {spec.CONTENT_TOO_LARGE, spec.PRECONDITION_FAILED}
    assert treatment_of(599) is Treatment.OUTAGE
    assert "max_message_size" in explained(spec.PRECONDITION_FAILED, "message size 2 is larger than configured")
    assert explained(spec.PRECONDITION_FAILED, "unacceptable_type_in_header") == "unacceptable_type_in_header (406)"


@pytest.mark.parametrize("kind", [pika.exceptions.ConnectionClosedByBroker, pika.exceptions.ChannelClosedByBroker])
def test_every_code_that_ends_a_connection_or_a_channel_is_raised(kind: Any) -> None:
    kinds = {code: type(exception_for(kind(code, "text"), addresses=PLACE)) for code in OF_AMQP}

    assert {code for code, one in kinds.items() if one is NotAuthorized} == {402, 403, 530}
    assert {code for code, one in kinds.items() if one is StorageFailed} == {506}
    assert set(kinds.values()) == {NotAuthorized, StorageFailed, BrokerUnavailable}


def test_every_exception_of_the_client_is_caught_and_has_its_class() -> None:
    classes = [one for _, one in inspect.getmembers(pika.exceptions, inspect.isclass) if issubclass(one, Exception)]
    made = [made_of(one) for one in classes]

    kinds = {type(one).__name__: type(exception_for(one, addresses=PLACE)) for one in made}

    assert len(kinds) > 30
    assert [one for one in made if not isinstance(one, CLIENT_ERRORS)] == []
    assert {name for name, kind in kinds.items() if kind is NotAuthenticated} == {"AuthenticationError"}
    assert {name for name, kind in kinds.items() if kind is StorageFailed} == {"ConnectionBlockedTimeout"}


@pytest.mark.parametrize("error", [OSError("refused"), TimeoutError(), ssl.SSLError("bad certificate")])
def test_troubles_of_the_network_are_outages_with_the_address(error: Exception) -> None:
    raised = exception_for(error, addresses=PLACE)

    assert (type(raised), PLACE in str(raised)) == (BrokerUnavailable, True)


@pytest.mark.parametrize(
    ("guess", "reply", "kind"),
    [
        (pika.exceptions.ProbableAuthenticationError, (403, "ACCESS_REFUSED - Login was refused"), NotAuthenticated),
        (pika.exceptions.ProbableAccessDeniedError, (530, "NOT_ALLOWED - vhost zz not found"), NotAuthorized),
        (pika.exceptions.ProbableAccessDeniedError, (541, "INTERNAL_ERROR"), BrokerUnavailable),
        (pika.exceptions.ProbableAuthenticationError, None, BrokerUnavailable),
    ],
)
def test_a_guess_of_the_client_counts_where_the_server_gave_a_code(
    guess: type[Exception], reply: tuple[int, str] | None, kind: type[BrokerError]
) -> None:
    lost = pika.exceptions.StreamLostError("connection reset")
    cause = lost if reply is None else pika.exceptions.ConnectionClosedByBroker(*reply)

    raised = exception_for(guess(repr(cause)), addresses=PLACE)

    assert type(raised) is kind
    assert reply is None or reply[1] in str(raised)


def test_of_several_servers_one_that_refuses_the_login_says_more_than_one_that_is_down() -> None:
    refused = pika.exceptions.ConnectionClosedByBroker(403, "Login was refused")
    guess = pika.exceptions.ProbableAuthenticationError(repr(refused))
    of_each = [
        workflow.AMQPConnectorAMQPHandshakeError(guess),
        workflow.AMQPConnectorSocketConnectError(ConnectionRefusedError()),
    ]

    raised = exception_for(workflow.AMQPConnectionWorkflowFailed(of_each), addresses=PLACE)

    assert type(raised) is NotAuthenticated


def made_of(kind: type[Exception]) -> Exception:
    """An exception of the client's, as it makes them."""
    if issubclass(kind, pika.exceptions.ConnectionClosed | pika.exceptions.ChannelClosed):
        return kind(541, "INTERNAL_ERROR")
    if issubclass(kind, pika.exceptions.UnroutableError | pika.exceptions.NackError):
        return kind([])
    return kind("text", "more")
