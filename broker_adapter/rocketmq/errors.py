"""RocketMQ's codes and gRPC's, in one table: what becomes of a message, or of the whole batch, after each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc
import msgspec

from broker_adapter.publishing.treatment import ONE_MESSAGE, Treatment, batch_error, treatments_by_name
from broker_adapter.rocketmq.protocol.definition_pb2 import Code, Status
from outbox_core.common.errors import BrokerError

_REJECTED = """
ILLEGAL_TOPIC ILLEGAL_LITE_TOPIC ILLEGAL_MESSAGE_TAG ILLEGAL_MESSAGE_KEY ILLEGAL_MESSAGE_GROUP
ILLEGAL_MESSAGE_PROPERTY_KEY ILLEGAL_MESSAGE_ID ILLEGAL_DELIVERY_TIME MESSAGE_CORRUPTED PAYLOAD_TOO_LARGE
MESSAGE_BODY_TOO_LARGE MESSAGE_BODY_EMPTY REQUEST_HEADER_FIELDS_TOO_LARGE MESSAGE_PROPERTIES_TOO_LARGE
"""
_DEFERRED = "TOPIC_NOT_FOUND NOT_FOUND FORBIDDEN MESSAGE_PROPERTY_CONFLICT_WITH_TYPE LITE_TOPIC_QUOTA_EXCEEDED"
_STORAGE = "MASTER_PERSISTENCE_TIMEOUT SLAVE_PERSISTENCE_TIMEOUT HA_NOT_AVAILABLE"
_NOT_AUTHENTICATED = "UNAUTHORIZED"
_NOT_AUTHORIZED = "PAYMENT_REQUIRED"
_OUTAGE = """
CODE_UNSPECIFIED MULTIPLE_RESULTS BAD_REQUEST ILLEGAL_ACCESS_POINT UNRECOGNIZED_CLIENT_TYPE CLIENT_ID_REQUIRED
INVALID_CLIENT_PROPERTIES REQUEST_TIMEOUT PRECONDITION_FAILED TOO_MANY_REQUESTS INTERNAL_ERROR INTERNAL_SERVER_ERROR
NOT_IMPLEMENTED PROXY_TIMEOUT UNSUPPORTED VERSION_UNSUPPORTED
"""
_NOT_A_PRODUCERS = """
OK ILLEGAL_CONSUMER_GROUP INVALID_TRANSACTION_ID ILLEGAL_FILTER_EXPRESSION ILLEGAL_INVISIBLE_TIME INVALID_RECEIPT_HANDLE
ILLEGAL_POLLING_TIME ILLEGAL_OFFSET MESSAGE_NOT_FOUND CONSUMER_GROUP_NOT_FOUND OFFSET_NOT_FOUND
LITE_SUBSCRIPTION_QUOTA_EXCEEDED VERIFY_FIFO_MESSAGE_UNSUPPORTED FAILED_TO_CONSUME_MESSAGE
"""
NOT_A_PRODUCERS: Final = frozenset(_NOT_A_PRODUCERS.split())
"""Codes of consumers and transactions, which no send answers. Should one come, it is an outage."""

TREATMENTS: Final[Mapping[str, Treatment]] = treatments_by_name(
    {
        Treatment.REJECTED: _REJECTED,
        Treatment.DEFERRED: _DEFERRED,
        Treatment.STORAGE: _STORAGE,
        Treatment.NOT_AUTHENTICATED: _NOT_AUTHENTICATED,
        Treatment.NOT_AUTHORIZED: _NOT_AUTHORIZED,
        Treatment.OUTAGE: _OUTAGE,
    }
)
"""By the name of a Code."""

_BY_TEXT: Final[tuple[tuple[str, str, Treatment], ...]] = (
    ("UNAUTHORIZED", "no permission", Treatment.DEFERRED),
    ("UNAUTHORIZED", "is not found", Treatment.OUTAGE),  # as a proxy says of each user, too, while its brokers are down
    ("INTERNAL_SERVER_ERROR", "message body size exceeded", Treatment.REJECTED),
    ("INTERNAL_SERVER_ERROR", "the message is illegal", Treatment.REJECTED),
    ("INTERNAL_SERVER_ERROR", "disk is full", Treatment.STORAGE),
    ("INTERNAL_SERVER_ERROR", "create mapped file failed", Treatment.STORAGE),
)
"""What a code does not tell apart, and its text does: the proxy passes on what a broker says under one code."""

_CURES: Final[tuple[tuple[str, str, str], ...]] = (
    ("TOPIC_NOT_FOUND", "", "create it: mqadmin updateTopic -t TOPIC -a +message.type=NORMAL, or FIFO for order"),
    ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", "UNSPECIFIED", "create the topic with mqadmin updateTopic"),
    ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", "alone", "make one with -a +message.type=NORMAL, or FIFO for order"),
    ("MESSAGE_BODY_TOO_LARGE", "", "too large: raise maxMessageSize of proxy and broker for those that follow"),
    ("INTERNAL_SERVER_ERROR", "message body size exceeded", "too large for the broker: raise its maxMessageSize"),
    ("INTERNAL_SERVER_ERROR", "the message is illegal", "too large for the broker: raise its maxMessageSize"),
    ("MESSAGE_PROPERTIES_TOO_LARGE", "", "raise maxUserPropertySize and userPropertyMaxNum of the proxy"),
    ("FORBIDDEN", "no writable queue", "give the topic write permission: mqadmin updateTopicPerm -p 6"),
    ("UNAUTHORIZED", "no permission", "allow Pub on the topic: mqadmin createAcl -a Pub -r Topic:TOPIC"),
    ("UNAUTHORIZED", "is not found", "start the brokers; if they run, check the access key in the broker's URL"),
    ("UNAUTHORIZED", "", "check access key and secret in the broker's URL"),
    ("INTERNAL_SERVER_ERROR", "disk is full", "make room on the broker's disk"),
    ("INTERNAL_SERVER_ERROR", "create mapped file failed", "make room on the broker's disk"),
    ("HA_NOT_AVAILABLE", "", "start the broker's slave, or lower inSyncReplicas"),
    ("gRPC UNAVAILABLE", "CERTIFICATE_VERIFY_FAILED", "name who signed it with ca_file= in the broker's URL"),
    ("gRPC UNAVAILABLE", "", "start the proxies; if they run, check hosts, ports and rocketmqs:// of the broker's URL"),
    ("gRPC DEADLINE_EXCEEDED", "", "see whether the proxies or brokers hang, or are cut off"),
)


class Refusal(msgspec.Struct, frozen=True):
    """An answer other than success: the name of RocketMQ's code, or of gRPC's status, and what the server said."""

    code: str
    text: str

    @classmethod
    def of_status(cls, status: Status) -> Refusal:
        """A status of RocketMQ's protocol, without the address of its manual; an unknown code is a number."""
        name = Code.Name(status.code) if status.code in Code.values() else str(status.code)
        return cls(name, status.message.partition("\n")[0])

    @classmethod
    def of_call(cls, error: grpc.RpcError) -> Refusal:
        """A call that got no answer of RocketMQ's protocol."""
        return cls(f"gRPC {error.code().name}", error.details() or "")

    @property
    def words(self) -> str:
        """The server's message, and the code."""
        return f"{self.text} ({self.code})"

    @property
    def cure(self) -> str:
        """The cure for an operator; empty if none is known."""
        return next((cure for code, part, cure in _CURES if code == self.code and part in self.text), "")

    def __str__(self) -> str:
        return f"{self.words}; {self.cure}" if self.cure else self.words


def treatment_of(refusal: Refusal) -> Treatment:
    """Returns the treatment of a refusal; an unknown code is an outage, which costs no attempt."""
    if refusal.code == "gRPC RESOURCE_EXHAUSTED" and "exceeds maximum size" in refusal.text:
        return Treatment.REJECTED
    if refusal.code == "gRPC UNAUTHENTICATED":
        return Treatment.NOT_AUTHENTICATED
    if refusal.code == "gRPC PERMISSION_DENIED":
        return Treatment.NOT_AUTHORIZED
    by_text = (how for code, part, how in _BY_TEXT if code == refusal.code and part in refusal.text)
    return next(by_text, TREATMENTS.get(refusal.code, Treatment.OUTAGE))


def concerns_one_message(refusal: Refusal) -> bool:
    """Whether nothing was stored, and other messages may be taken."""
    return treatment_of(refusal) in ONE_MESSAGE


def exception_for(refusal: Refusal, *, addresses: str) -> BrokerError:
    """Returns the exception for a whole batch; `addresses`: the proxies'."""
    treatment = treatment_of(refusal)
    if treatment is Treatment.DEFERRED:  # of a client as a whole, whom an operator can help
        treatment = Treatment.NOT_AUTHORIZED
    return batch_error(treatment, f"RocketMQ at {addresses}: {refusal}")
