"""The results of Pulsar's client, in one table: what becomes of a message, or of the whole batch, after each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker_adapter.publishing.treatment import Treatment, batch_error, treatments_by_name
from outbox_core.common.errors import BrokerError

_REJECTED = "MessageTooBig InvalidMessage InvalidTopicName"
_DEFERRED = """
TopicNotFound TopicTerminated AuthorizationError IncompatibleSchema NotAllowedError
ProducerBlockedQuotaExceededError ProducerBlockedQuotaExceededException ProducerBusy ProducerFenced
"""
_STORAGE = "BrokerPersistenceError"
_NOT_AUTHENTICATED = "AuthenticationError ErrorGettingAuthenticationData"
_OUTAGE = """
AlreadyClosed BrokerMetadataError ChecksumError ConnectError CryptoError Interrupted InvalidConfiguration InvalidUrl
LookupError MemoryBufferIsFull NotConnected OperationNotSupported ProducerNotInitialized ProducerQueueIsFull ReadError
ServiceUnitNotReady Timeout TooManyLookupRequestException UnknownError UnsupportedVersionError
"""
_NOT_A_PRODUCERS = """
Ok ConsumerAssignError ConsumerBusy ConsumerNotFound ConsumerNotInitialized CumulativeAcknowledgementNotAllowedError
InvalidTxnStatusError SubscriptionNotFound TransactionConflict TransactionCoordinatorNotFoundError TransactionNotFound
"""
NOT_A_PRODUCERS: Final = frozenset(_NOT_A_PRODUCERS.split())
"""Results of consumers and transactions, which no publish has. Should one come, it is an outage."""

TREATMENTS: Final[Mapping[str, Treatment]] = treatments_by_name(
    {
        Treatment.REJECTED: _REJECTED,
        Treatment.DEFERRED: _DEFERRED,
        Treatment.STORAGE: _STORAGE,
        Treatment.NOT_AUTHENTICATED: _NOT_AUTHENTICATED,
        Treatment.OUTAGE: _OUTAGE,
    }
)
"""By the name of the client's Result, which its exception of the same name has, too."""

_OF_MESSAGE: Final = frozenset({"MessageTooBig", "InvalidMessage"})
_CURES: Final[Mapping[str, str]] = {
    "MessageTooBig": "its size is above maxMessageSize of the servers; raise that for those that follow",
    "TopicNotFound": "create it with pulsar-admin topics create, or set allowAutoTopicCreation=true",
    "TopicTerminated": "it was terminated, and takes no message again: publish to another topic",
    "AuthorizationError": "allow it with pulsar-admin namespaces grant-permission --actions produce",
    "IncompatibleSchema": "the topic has a schema: allow producers without one, or create a topic that has none",
    "ProducerBlockedQuotaExceededError": "its backlog is full: consume it, or raise its quota",
    "ProducerBlockedQuotaExceededException": "its backlog is full: consume it, or raise its quota",
    "ConnectError": "start the servers; if they run, check whether they want pulsar:// or pulsar+ssl://",
    "AuthenticationError": "check the token, or user and password, of the broker's URL",
    "Timeout": "see whether brokers and bookies run, and have room; a refused login is reported with admin= only",
    "BrokerPersistenceError": "look at the bookies, which could not store it",
}


def treatment_of(result: str) -> Treatment:
    """Returns the treatment of a result; an unknown one is an outage, which costs no attempt."""
    return TREATMENTS.get(result, Treatment.OUTAGE)


def is_of_message(result: str) -> bool:
    """Whether it is about one message, and not about its topic: the next one of the topic may be taken."""
    return result in _OF_MESSAGE


def explained(result: str) -> str:
    """The result's name, and the cure where there is one."""
    cure = _CURES.get(result)
    return f"{result}; {cure}" if cure else result


def exception_for(result: str, *, what: str) -> BrokerError:
    """Returns the exception for a whole batch."""
    return batch_error(treatment_of(result), f"{what}: {explained(result)}")
