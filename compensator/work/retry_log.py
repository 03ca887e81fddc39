"""RetryLog: logs messages that the broker refused for now, one warning per topic and minute. Handles no failure."""

from __future__ import annotations

from collections import defaultdict

from compensator.work.poison_row_isolation import SentBatch
from outbox.store.message_table import ERROR_CHARS_MAX
from outbox.store.row import OutboxRow
from outbox_core.common.clock import Clock
from outbox_core.messages.delivery_decision import Retry
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LogInterval

logger: EventLogger = EventLogger(__name__)


class RetryLog:
    """The recent warnings of one source. Thread-safe."""

    def __init__(self, source: str, *, clock: Clock) -> None:
        """`source` is the name that logs and metrics give it."""
        self._source = source
        self._topics = LogInterval(clock)

    def write(self, sent: SentBatch) -> None:
        """Log the retries of a batch by topic, with the message tried most often. An outage, which is no row's attempt,
        is logged elsewhere.
        """
        reasons = {
            settlement.row_id: settlement.decision.error
            for settlement in sent.settlements
            if isinstance(settlement.decision, Retry) and settlement.decision.tried
        }
        topics: defaultdict[str, list[OutboxRow]] = defaultdict(list)
        for row in sent.rows:
            if row.id in reasons:
                topics[row.topic].append(row)
        for topic, rows in topics.items():
            if self._topics.is_time(topic):
                row = max(rows, key=lambda row: row.attempts)
                reason = reasons[row.id][:ERROR_CHARS_MAX]
                fields = {"source": self._source, "topic": topic, "rows": len(rows), "attempts": row.attempts}
                logger.warning("messages_retried", extra={**fields, "message_id": row.id, "reason": reason})
