"""Captures what every commit of this process publishes, at the commit: no broker, no thread, no wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outbox.producer.session_hooks import observed_commits
from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind
from outbox.testing.published import MESSAGES_MAX, PublishedMessages
from outbox_core.common.errors import InvalidMessage, OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(slots=True, eq=False)
class Capture:
    """The captured messages: `published` for the test's assertions, `undelivered` for its consumers."""

    published: PublishedMessages = field(default_factory=PublishedMessages)
    undelivered: deque[OutboxRow] = field(default_factory=lambda: deque(maxlen=MESSAGES_MAX))
    deliver: Callable[[], None] | None = None
    """Called after each commit, if set; it may raise only OutboxErrors."""

    def record(self, rows: Sequence[OutboxRow]) -> None:
        """Record the rows of one commit. Never raises: the commit has succeeded."""
        for row in rows:
            self._record_one(row)
        if self.deliver is not None:
            try:
                self.deliver()
            except OutboxError as error:
                logger.info("capture_not_delivered", extra={"rows": len(rows), "error": str(error)})

    def _record_one(self, row: OutboxRow) -> None:
        self.undelivered.append(row)
        if row.kind is RowKind.CANCEL:
            self.published.add_cancel(row.cancels)
            return
        try:
            self.published.add(row.message())
        except InvalidMessage as error:
            logger.warning("row_not_captured", extra={"message_id": row.id, "error": str(error)})


@contextmanager
def capturing() -> Iterator[Capture]:
    """Capture every commit until the block ends, of any Outbox, session and thread."""
    capture = Capture()
    with observed_commits(capture.record):
        yield capture


@contextmanager
def capture_published() -> Iterator[PublishedMessages]:
    """Yields the messages that are published inside the block; for tests without pytest.

    A message is captured when its session commits, also if that session has joined a transaction that the test will
    roll back (join_transaction_mode="create_savepoint"). Messages of a session that is rolled back are not captured.
    """
    with capturing() as capture:
        yield capture.published
