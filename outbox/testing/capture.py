"""Hears what every commit of this process publishes, as it commits: no broker, no thread, no wait. Not what for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outbox.producer.session_hooks import hearing
from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind
from outbox.testing.published import MESSAGES_MAX, Published
from outbox_core.common.errors import InvalidMessage, OutboxError

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Capture:
    """What was heard: `published` for the test to look at, `undelivered` for its consumers."""

    published: Published = field(default_factory=Published)
    undelivered: deque[OutboxRow] = field(default_factory=lambda: deque(maxlen=MESSAGES_MAX))
    deliver: Callable[[], None] | None = None
    """Called behind each commit, if there is somebody to deliver to; it raises OutboxErrors alone."""

    def hear(self, rows: Sequence[OutboxRow]) -> None:
        """Note what one commit wrote. Never raises: the commit has succeeded."""
        for row in rows:
            self._hear_one(row)
        if self.deliver is not None:
            try:
                self.deliver()
            except OutboxError as error:
                logger.info("capture_not_delivered", extra={"rows": len(rows), "error": str(error)})

    def _hear_one(self, row: OutboxRow) -> None:
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
    """Hear every commit until the block ends, of whatever Outbox, session and thread."""
    capture = Capture()
    with hearing(capture.hear):
        yield capture


@contextmanager
def capture_published() -> Iterator[Published]:
    """What is published inside the block; for tests without pytest.

    A message is heard of when its session commits: also where that session has joined a transaction that the test will
    roll back (join_transaction_mode="create_savepoint"). What is rolled back with its own session is not heard of.
    """
    with capturing() as capture:
        yield capture.published
