"""The failure that ends a shard's store: an error of an append or a sync, after reading whose the shard is."""

from __future__ import annotations

import threading

from outbox_broker.segments.ledger_takeover import Shard, read_node
from outbox_broker.segments.ledgers import LedgerFailed, LedgerFenced
from outbox_broker.segments.port import WriterFenced
from outbox_core.common.errors import StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class FinalFailure:
    """None at first; the first one stays. Thread-safe.

    The shard's node is read before anything else is done: only the error of a fence proves another writer, and its
    absence proves nothing.
    """

    def __init__(self, shard: Shard, *, epoch: int) -> None:
        self._shard = shard
        self._epoch = epoch
        self._guard = threading.Lock()
        self._failure: StorageFailed | None = None

    @property
    def has_happened(self) -> bool:
        """Whether the store can write no more."""
        return self._failure is not None

    def refuse(self) -> None:
        """Raise the failure, if there was one."""
        if self._failure is not None:
            raise _copy_of(self._failure)

    def note(self, error: LedgerFailed) -> StorageFailed:
        """Make an error the final failure; returns what to raise."""
        with self._guard:
            if self._failure is None:
                self._failure = self._judged(error)
                logger.critical("shard_failed", extra={"shard": self._shard.name, "error": str(self._failure)})
            return _copy_of(self._failure)

    def note_not_created(self, error: LedgerFailed) -> StorageFailed:
        """Returns what to raise as a ledger could not be created. It leaves nothing in doubt: so only a takeover is
        final.
        """
        found = self._judged(error)
        if isinstance(found, WriterFenced):
            with self._guard:
                self._failure = self._failure or found
            return found
        return StorageFailed(f"no ledger can be created: {error}; see to it that enough bookies are writable")

    def _judged(self, error: LedgerFailed) -> StorageFailed:
        fenced = WriterFenced(f"another process writes to shard {self._shard.name} now; this one must end")
        if isinstance(error, LedgerFenced):
            return fenced
        failed = StorageFailed(f"the bookies did not confirm a write: {error}; open the shard again")
        try:
            found = read_node(self._shard)
        except Exception:  # whatever it is, the error that led here is the one to report
            logger.warning("manifest_not_read", extra={"shard": self._shard.name}, exc_info=True)
            return failed
        return fenced if found is None or found.node.epoch != self._epoch else failed


def _copy_of(failure: StorageFailed) -> StorageFailed:
    return type(failure)(str(failure))
