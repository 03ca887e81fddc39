"""The one error tree, and for each error whether trying again can help.

OutboxError
├── UsageError                       the caller must change something; trying again cannot help
│   ├── InvalidMessage               a topic, key, header, body, id or time that breaks a named bound
│   ├── FilterError                  a group's filter that cannot be read: carries the position
│   ├── NoTransaction                publish() or cancel() where no transaction is open
│   ├── ConfigurationError           a URL, option or engine that cannot work
│   └── SchemaMissing                the message tables are not there: `outbox db upgrade`
├── TransactionDoomed                the database ended the transaction behind the caller's back; run all of it again
├── DuplicateMessageId               a message with this id was published already
├── DatabaseUnavailable              the database did not answer; trying again can help
├── SegmentDamaged                   a log segment has a flipped bit (outbox_core.journal); restore it from a copy
└── BrokerError
    ├── BrokerUnavailable            no answer, or "not now": it may have arrived; trying again can help
    │   └── BrokerThrottled          "later": carries retry_after_ms; nothing was stored
    ├── BrokerRefused                the broker will never take this request as it is; trying again cannot help
    │   ├── InUse                    a topic or consumer group is in use, and is not deleted: stop its clients, or force
    │   ├── GroupDeleted             the consumer group was deleted while the pull waited; a new pull makes a new group
    │   ├── NotAuthorized            the token lacks the role for this topic
    │   │   └── NotAuthenticated     token missing or wrong: it is good for no topic
    │   └── NotSupported             the broker behind this adapter cannot do that at all
    └── StorageFailed                the broker cannot make anything durable now (full disk, failed fsync)
"""

from __future__ import annotations


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
    """publish() and cancel() belong to a transaction, and none is open here."""


class ConfigurationError(UsageError):
    """An option, URL or engine that cannot work; the message names the cure."""


class SchemaMissing(UsageError):
    """The outbox tables are missing or older than this code: run `outbox db upgrade --url URL`."""


class TransactionDoomed(OutboxError):
    """The database rolled back (part of) this transaction and the error was swallowed.

    Commit is refused; all of the transaction must run again.
    """

    retryable = True


class DuplicateMessageId(OutboxError):
    """A message with this id is in the outbox already; the business transaction was rolled back."""


class DatabaseUnavailable(OutboxError):
    """The database did not answer in time or closed the connection."""

    retryable = True


class BrokerError(OutboxError):
    """Anything that goes wrong between us and a broker."""


class BrokerUnavailable(BrokerError):
    """No answer, or "not now". What was sent may have arrived: send it again under the same message id."""

    retryable = True


class BrokerThrottled(BrokerUnavailable):
    """The broker asks for a pause; nothing of this request was stored."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class BrokerRefused(BrokerError):
    """The broker will never take this request as it is; nothing of it was stored."""


class InUse(BrokerRefused):
    """A topic or a consumer group is in use, and was not deleted; the message names the cure."""


class GroupDeleted(BrokerRefused):
    """The consumer group was deleted while this pull waited.

    A new pull makes a new group of that name, as for any name that is new.
    """


class NotAuthorized(BrokerRefused):
    """The token is missing, wrong, or lacks the role for this topic.

    An operator can mend it, so rows are not parked for it.
    """

    retryable = True


class NotAuthenticated(NotAuthorized):
    """The token is missing or wrong: nothing goes through with it, whatever the topic."""


class NotSupported(BrokerRefused):
    """The broker behind this adapter cannot do this at all (cancel, delay, seek...)."""


class StorageFailed(BrokerError):
    """The broker cannot make anything durable now: full disk or failed fsync. Nothing was acknowledged."""

    retryable = True
