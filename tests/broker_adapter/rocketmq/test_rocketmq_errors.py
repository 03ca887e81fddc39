"""The table of RocketMQ's errors: complete over the protocol's codes, and right where it matters most."""

from __future__ import annotations

import grpc
import pytest

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.rocketmq.errors import NOT_A_PRODUCERS, TREATMENTS, Refusal, exception_for, treatment_of
from broker_adapter.rocketmq.protocol.definition_pb2 import Code, Status
from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed

CODES = set(Code.keys())


def test_each_code_of_the_protocol_is_in_the_table_or_named_as_none_of_a_producers() -> None:
    assert len(CODES) > 50
    assert CODES - set(TREATMENTS) - NOT_A_PRODUCERS == set()
    assert set(TREATMENTS) & NOT_A_PRODUCERS == set()


def test_the_table_names_no_code_that_the_protocol_does_not_have() -> None:
    assert (set(TREATMENTS) | NOT_A_PRODUCERS) - CODES == set()


@pytest.mark.parametrize(
    ("code", "text", "treatment"),
    [
        ("MESSAGE_BODY_TOO_LARGE", "message body cannot exceed the max 4194304", Treatment.REJECTED),
        ("INTERNAL_SERVER_ERROR", "java.lang.RuntimeException: message body size exceeded, ...", Treatment.REJECTED),
        ("gRPC RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 4194304: 5000000", Treatment.REJECTED),
        ("gRPC RESOURCE_EXHAUSTED", "flow limit", Treatment.OUTAGE),
        ("TOPIC_NOT_FOUND", "No topic route info in name server for the topic: t", Treatment.DEFERRED),
        ("UNAUTHORIZED", "User:app has no permission to access Topic:t from 127.0.0.1", Treatment.DEFERRED),
        ("UNAUTHORIZED", "check signature failed.", Treatment.NOT_AUTHENTICATED),
        ("UNAUTHORIZED", "User:app is not found.", Treatment.OUTAGE),
        ("MASTER_PERSISTENCE_TIMEOUT", "send message failed, sendStatus=FLUSH_DISK_TIMEOUT", Treatment.STORAGE),
        ("INTERNAL_SERVER_ERROR", "connect to 127.0.0.1:20911 failed. RemotingConnectException", Treatment.OUTAGE),
        ("INTERNAL_SERVER_ERROR", "it may be caused by: the broker's disk is full [CL: 0.95]", Treatment.STORAGE),
        ("INTERNAL_SERVER_ERROR", "create mapped file failed, server is busy or broken.", Treatment.STORAGE),
        ("gRPC DEADLINE_EXCEEDED", "Deadline Exceeded", Treatment.OUTAGE),
        ("54321", "a code of tomorrow", Treatment.OUTAGE),
        ("INVALID_RECEIPT_HANDLE", "a consumer's", Treatment.OUTAGE),
    ],
)
def test_a_refusal_is_treated_as_the_table_says(code: str, text: str, treatment: Treatment) -> None:
    assert treatment_of(Refusal(code, text)) is treatment


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("PROXY_TIMEOUT", BrokerUnavailable),
        ("HA_NOT_AVAILABLE", StorageFailed),
        ("UNAUTHORIZED", NotAuthenticated),
        ("PAYMENT_REQUIRED", NotAuthorized),
        ("gRPC UNAUTHENTICATED", NotAuthenticated),
        ("gRPC PERMISSION_DENIED", NotAuthorized),
    ],
)
def test_what_concerns_a_whole_batch_is_raised_with_the_servers_words(code: str, kind: type[BrokerError]) -> None:
    error = exception_for(Refusal(code, "what it said"), addresses="h:8081")

    assert type(error) is kind
    assert "h:8081: what it said" in str(error)


def test_a_status_loses_the_address_of_the_manual_and_a_code_that_is_not_known_is_a_number() -> None:
    words = Refusal.of_status(Status(code=Code.TOPIC_NOT_FOUND, message="no route\nFor more information, visit"))
    unknown = Refusal.of_status(Status(code=54321, message="new"))  # type: ignore[arg-type]

    assert str(words).startswith("no route (TOPIC_NOT_FOUND); create it")
    assert (unknown.code, str(unknown)) == ("54321", "new (54321)")


def test_each_status_of_grpc_is_treated_without_rejecting_a_message() -> None:
    codes = {f"gRPC {code.name}" for code in grpc.StatusCode}

    assert {treatment_of(Refusal(code, "")) for code in codes} & {Treatment.REJECTED, Treatment.DEFERRED} == set()
