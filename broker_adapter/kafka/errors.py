"""Kafka's and librdkafka's error codes, in one table: what becomes of a message, or of the whole batch, after each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from confluent_kafka import KafkaError

from outbox_core.common.errors import BrokerError, BrokerUnavailable, NotAuthenticated, NotAuthorized, StorageFailed


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


_REJECTED = "MSG_SIZE_TOO_LARGE RECORD_LIST_TOO_LARGE INVALID_RECORD INVALID_MSG_SIZE TOPIC_EXCEPTION"
_DEFERRED = """
UNKNOWN_TOPIC_OR_PART UNKNOWN_TOPIC_ID _UNKNOWN_TOPIC _UNKNOWN_PARTITION TOPIC_AUTHORIZATION_FAILED POLICY_VIOLATION
INVALID_TIMESTAMP UNSUPPORTED_COMPRESSION_TYPE UNSUPPORTED_FOR_MESSAGE_FORMAT
"""
_STORAGE = "NOT_ENOUGH_REPLICAS NOT_ENOUGH_REPLICAS_AFTER_APPEND _ISR_INSUFF KAFKA_STORAGE_ERROR LOG_DIR_NOT_FOUND"
_NOT_AUTHENTICATED = """
_AUTHENTICATION SASL_AUTHENTICATION_FAILED ILLEGAL_SASL_STATE UNSUPPORTED_SASL_MECHANISM UNACCEPTABLE_CREDENTIAL
DELEGATION_TOKEN_EXPIRED DELEGATION_TOKEN_NOT_FOUND DELEGATION_TOKEN_AUTH_DISABLED
PRINCIPAL_DESERIALIZATION_FAILURE
"""
_NOT_AUTHORIZED = "CLUSTER_AUTHORIZATION_FAILED TRANSACTIONAL_ID_AUTHORIZATION_FAILED"
_OUTAGE = """
UNKNOWN INVALID_MSG LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION REQUEST_TIMED_OUT BROKER_NOT_AVAILABLE
REPLICA_NOT_AVAILABLE NETWORK_EXCEPTION STALE_CTRL_EPOCH STALE_BROKER_EPOCH NOT_CONTROLLER INVALID_REQUEST
INVALID_REQUIRED_ACKS INVALID_CONFIG UNSUPPORTED_VERSION LISTENER_NOT_FOUND THROTTLING_QUOTA_EXCEEDED
ELIGIBLE_LEADERS_NOT_AVAILABLE FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH INCONSISTENT_TOPIC_ID REBOOTSTRAP_REQUIRED
COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR CONCURRENT_TRANSACTIONS
OUT_OF_ORDER_SEQUENCE_NUMBER DUPLICATE_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING
INVALID_PRODUCER_EPOCH PRODUCER_FENCED SECURITY_DISABLED
_ALL_BROKERS_DOWN _APPLICATION _BAD_COMPRESSION _BAD_MSG _CONFLICT _CRIT_SYS_RESOURCE _DESTROY _DESTROY_BROKER _FAIL
_FATAL _FENCED _FS _GAPLESS_GUARANTEE _INCONSISTENT _INTR _INVALID_ARG _INVALID_TYPE _IN_PROGRESS _MSG_TIMED_OUT
_NODE_UPDATE _NOENT _NOT_CONFIGURED _NOT_IMPLEMENTED _OUTDATED _PARTIAL _PREV_IN_PROGRESS _PURGE_INFLIGHT
_PURGE_QUEUE _QUEUE_FULL _READ_ONLY _RESOLVE _RETRY _SSL _STATE _TIMED_OUT _TIMED_OUT_QUEUE _TRANSPORT _UNDERFLOW
_UNKNOWN_BROKER _UNKNOWN_PROTOCOL _UNSUPPORTED_FEATURE _WAIT_CACHE _WAIT_COORD
"""
_NOT_A_PRODUCERS = """
NO_ERROR DELEGATION_TOKEN_AUTHORIZATION_FAILED DELEGATION_TOKEN_OWNER_MISMATCH DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
DUPLICATE_RESOURCE DUPLICATE_VOTER ELECTION_NOT_NEEDED FEATURE_UPDATE_FAILED FENCED_INSTANCE_ID FENCED_MEMBER_EPOCH
FENCED_STATE_EPOCH FETCH_SESSION_ID_NOT_FOUND GROUP_AUTHORIZATION_FAILED GROUP_ID_NOT_FOUND GROUP_MAX_SIZE_REACHED
GROUP_SUBSCRIBED_TO_TOPIC ILLEGAL_GENERATION INCONSISTENT_GROUP_PROTOCOL INCONSISTENT_VOTER_SET
INVALID_COMMIT_OFFSET_SIZE INVALID_FETCH_SESSION_EPOCH INVALID_GROUP_ID INVALID_PARTITIONS INVALID_PRINCIPAL_TYPE
INVALID_RECORD_STATE INVALID_REGISTRATION INVALID_REGULAR_EXPRESSION INVALID_REPLICATION_FACTOR
INVALID_REPLICA_ASSIGNMENT INVALID_SESSION_TIMEOUT INVALID_SHARE_SESSION_EPOCH INVALID_TRANSACTION_TIMEOUT
INVALID_TXN_STATE INVALID_UPDATE_VERSION INVALID_VOTER_KEY MEMBER_ID_REQUIRED MISMATCHED_ENDPOINT_TYPE NON_EMPTY_GROUP
NO_REASSIGNMENT_IN_PROGRESS OFFSET_METADATA_TOO_LARGE OFFSET_NOT_AVAILABLE OFFSET_OUT_OF_RANGE OPERATION_NOT_ATTEMPTED
PREFERRED_LEADER_NOT_AVAILABLE REASSIGNMENT_IN_PROGRESS REBALANCE_IN_PROGRESS RESOURCE_NOT_FOUND
SHARE_SESSION_LIMIT_REACHED SHARE_SESSION_NOT_FOUND STALE_MEMBER_EPOCH STREAMS_INVALID_TOPOLOGY
STREAMS_INVALID_TOPOLOGY_EPOCH STREAMS_TOPOLOGY_FENCED TELEMETRY_TOO_LARGE TOPIC_ALREADY_EXISTS
TOPIC_DELETION_DISABLED TRANSACTION_ABORTABLE TRANSACTION_COORDINATOR_FENCED UNKNOWN_CONTROLLER_ID UNKNOWN_MEMBER_ID
UNKNOWN_SUBSCRIPTION_ID UNRELEASED_INSTANCE_ID UNSTABLE_OFFSET_COMMIT UNSUPPORTED_ASSIGNOR UNSUPPORTED_ENDPOINT_TYPE
VOTER_NOT_FOUND _ASSIGNMENT_LOST _ASSIGN_PARTITIONS _AUTO_OFFSET_RESET _EXISTING_SUBSCRIPTION
_INVALID_DIFFERENT_RECORD _KEY_DESERIALIZATION _KEY_SERIALIZATION _LOG_TRUNCATION _MAX_POLL_EXCEEDED _NOOP _NO_OFFSET
_PARTITION_EOF _REVOKE_PARTITIONS _UNKNOWN_GROUP _VALUE_DESERIALIZATION _VALUE_SERIALIZATION
"""
NOT_A_PRODUCERS: Final = frozenset(_NOT_A_PRODUCERS.split())
"""Codes of consumers, transactions and administration, which no produce answers. Should one come, it is an outage."""

TREATMENTS: Final[Mapping[str, Treatment]] = {
    name: treatment
    for treatment, names in {
        Treatment.REJECTED: _REJECTED,
        Treatment.DEFERRED: _DEFERRED,
        Treatment.STORAGE: _STORAGE,
        Treatment.NOT_AUTHENTICATED: _NOT_AUTHENTICATED,
        Treatment.NOT_AUTHORIZED: _NOT_AUTHORIZED,
        Treatment.OUTAGE: _OUTAGE,
    }.items()
    for name in names.split()
}
"""By the name of KafkaError's constant."""

_NO_CONNECTION: Final = "start the servers; if they run, check that security= of the broker's URL is the listener's"
_CURES: Final[Mapping[str, str]] = {
    "UNKNOWN_TOPIC_OR_PART": "create it with kafka-topics.sh --create",
    "_UNKNOWN_TOPIC": "create it with kafka-topics.sh --create",
    "MSG_SIZE_TOO_LARGE": "raise the topic's max.message.bytes for those that follow",
    "TOPIC_AUTHORIZATION_FAILED": "allow Write and Describe with kafka-acls.sh",
    "INVALID_TIMESTAMP": "the clocks differ, or raise message.timestamp.before.max.ms and .after.max.ms of the topic",
    "INVALID_RECORD": "a compacted topic takes messages with a key only",
    "NOT_ENOUGH_REPLICAS": "start the brokers that are missing",
    "_TRANSPORT": _NO_CONNECTION,
    "_TIMED_OUT": _NO_CONNECTION,
}


def treatment_of(error: KafkaError) -> Treatment:
    """What an error means; a code that this table does not know yet is an outage, which costs no attempt."""
    return TREATMENTS.get(_name(error), Treatment.OUTAGE)


def explained(error: KafkaError) -> str:
    """The error's own words and code, and the cure where there is one."""
    cure = _CURES.get(_name(error))
    text = f"{error.str()} ({_name(error)})"
    return f"{text}; {cure}" if cure else text


def exception_for(error: KafkaError, *, what: str, reason: str | None = None) -> BrokerError:
    """What to raise for a whole batch. `reason`: what librdkafka said last, where the error itself says less."""
    text = f"{what}: {explained(error)}" + (f"; {reason}" if reason else "")
    match treatment_of(error):
        case Treatment.NOT_AUTHENTICATED:
            return NotAuthenticated(f"{text}; check user, password and sasl= of the broker's URL")
        case Treatment.NOT_AUTHORIZED:
            return NotAuthorized(f"{text}; allow IdempotentWrite on the cluster, or Write on the topic")
        case Treatment.STORAGE:
            return StorageFailed(text)
        case _:
            return BrokerUnavailable(text)


def _name(error: KafkaError) -> str:
    return str(error.name())
