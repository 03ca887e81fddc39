"""The tree of all errors, and for each whether a retry can help.

OutboxError
├── UsageError                       the caller must change something; a retry cannot help
│   ├── InvalidMessage               a topic, key, header, body, id or time that breaks a named bound
│   ├── FilterError                  a group's filter that cannot be read: carries the position
│   ├── NoTransaction                publish() or cancel() outside a transaction
│   ├── ConfigurationError           a URL, option or engine that cannot work
│   └── SchemaMissing                the message tables are missing: run `outbox db upgrade`
├── TransactionDoomed                the database ended the transaction, the error was swallowed; run all of it again
├── DuplicateMessageId               a message with this id was published already
├── DatabaseUnavailable              the database did not answer; a retry can help
├── SegmentDamaged                   a log segment has a flipped bit (outbox_core.journal); restore it from a copy
└── BrokerError
    ├── BrokerUnavailable            no answer, or a temporary failure: the request may have arrived; a retry can help
    │   └── BrokerThrottled          back-pressure: carries retry_after_ms; nothing was stored
    │       └── BrokerCordoned       an operator has the broker take no new messages for now; nothing was stored
    ├── BrokerRefused                the broker will never accept this request as it is; a retry cannot help
    │   ├── InvalidRequest           it has a name, filter or value that is taken from nobody; a UsageError as well
    │   ├── InUse                    a topic or consumer group is in use, and is not deleted: stop its clients, or force
    │   ├── GroupDeleted             the consumer group was deleted while the pull waited; a new pull creates a new one
    │   ├── NotAuthorized            the token lacks the role for this topic
    │   │   └── NotAuthenticated     the token is missing or wrong, for every topic
    │   └── NotSupported             the broker behind this adapter does not have this operation
    └── StorageFailed                the broker cannot make anything durable now (full disk, failed fsync)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""What a decoder of msgspec raises at bytes that are not what they should be: not of the encoding or of the shape, text
that is not UTF-8, nested too deeply, a number that no integer of C holds. Whoever decodes what others can write, a
flipped bit too, catches all of them.
"""


class OutboxError(Exception):
    """Root of all errors that this project raises on purpose."""

    retryable: bool = False


class UsageError(OutboxError):
    """The caller must change something; the message says what."""


class InvalidMessage(UsageError, ValueError):
    """A part of a message breaks a named bound; nothing was stored."""


class FilterError(UsageError, ValueError):
    """A group's filter cannot be read, or is larger than allowed; `position` counts characters from 1."""

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message if position is None else f"{message} (at character {position})")
        self.position = position


class NoTransaction(UsageError):
    """publish() or cancel() was called outside a transaction."""


class ConfigurationError(UsageError):
    """An option, URL or engine that cannot work; the message names the cure."""


class SchemaMissing(UsageError):
    """The outbox tables are missing or older than this code: run `outbox db upgrade --url URL`."""


class TransactionDoomed(OutboxError):
    """The database rolled back (part of) this transaction and the error was swallowed.

    The commit is refused; all of the transaction must run again.
    """

    retryable = True


class DuplicateMessageId(OutboxError):
    """A message with this id is in the outbox already; the business transaction was rolled back."""


class DatabaseUnavailable(OutboxError):
    """The database did not answer in time or closed the connection."""

    retryable = True


class BrokerError(OutboxError):
    """Any failure of a request to a broker.

    `answered` of a publish has, by the message's place in the batch, the PublishResults that were known before the
    failure: they hold, whatever became of the others.
    """

    answered: Mapping[int, Any] = MappingProxyType({})

    def with_answered(self, answered: Mapping[int, Any]) -> Self:
        """Returns this error, with the results that were known before it."""
        self.answered = dict(answered)
        return self


class BrokerUnavailable(BrokerError):
    """No answer, or a temporary failure. The request may have arrived: repeat it with the same message ids."""

    retryable = True


class BrokerThrottled(BrokerUnavailable):
    """The broker applies back-pressure: retry after `retry_after_ms`. Nothing of this request was stored."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class BrokerCordoned(BrokerThrottled):
    """An operator has the broker take no new messages for now. Nothing of this request was stored."""


class BrokerRefused(BrokerError):
    """The broker will never accept this request as it is; nothing of it was stored but what is `answered`.

    A batch may be refused for any one of its messages (outbox_core.messages.refused_batch_isolation finds it).
    `in_doubt`: the broker stores a batch in order up to the message that it refuses, and did not say which that is:
    those before it may be stored.
    """

    in_doubt: bool = False


class InvalidRequest(BrokerRefused, UsageError):
    """The request has a name, a filter or a value that the broker takes from nobody: the caller must change it, as if
    his own side had found it.
    """


class InUse(BrokerRefused):
    """A topic or a consumer group is in use, and was not deleted; the message names the cure."""


class GroupDeleted(BrokerRefused):
    """The consumer group was deleted while this pull waited.

    A new pull creates a new group of that name, as for any unknown name.
    """


class NotAuthorized(BrokerRefused):
    """The token is missing, wrong, or lacks the role for this topic.

    An operator can correct this, so no row is parked because of it.
    """

    retryable = True


class NotAuthenticated(NotAuthorized):
    """The token is missing or wrong: the broker rejects every request with it, for any topic."""


class NotSupported(BrokerRefused):
    """The broker behind this adapter does not have this operation (cancel, delay, seek...)."""


class StorageFailed(BrokerError):
    """The broker cannot make anything durable now: full disk or failed fsync. Nothing was acknowledged."""

    retryable = True


def utf8_text(text: str) -> str:
    """Returns the text with its lone surrogates escaped: they have no UTF-8, and neither databases nor brokers take
    them.
    """
    return text.encode(errors="backslashreplace").decode()


def install_hint(extra: str) -> str:
    """Returns what is to be typed for the packages of an extra."""
    return f"pip install 'outbox-mq[{extra}]', or '.[{extra}]' in a checkout"
