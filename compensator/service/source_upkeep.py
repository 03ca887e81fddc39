"""Periodic work on sources: counts for the gauges, and retention. The schedule is elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from compensator.service.metrics import CompensatorMetrics
from compensator.work.source import Source
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepOptions:
    """Intervals of counting rows (a longer one if no rows were found since) and of deleting old evidence."""

    gauges_ms: int = 60_000
    gauges_idle_ms: int = 300_000
    gauges_check_ms: int = 10_000
    retention_ms: int = 60_000


class Upkeep:
    """Upkeep of many sources, one after the other: one whose database is unavailable must not block the others."""

    def __init__(
        self, metrics: CompensatorMetrics, *, options: UpkeepOptions, clock: Clock, stopping: threading.Event
    ) -> None:
        self._metrics = metrics
        self._options = options
        self._clock = clock
        self._stopping = stopping
        self._counted_at_ms: dict[str, int] = {}
        self._busy: set[str] = set()

    def busy(self, source: str) -> None:
        """Record that rows were found in a source: it is counted sooner."""
        self._busy.add(source)

    def count(self, sources: Iterable[Source]) -> None:
        """Count the rows of those sources whose count is due."""
        for source in sources:
            if self._stopping.is_set():
                return
            if self._is_time(source.name):
                self._count(source)

    def retain(self, sources: Iterable[Source]) -> None:
        """Delete old evidence, one round of each source in turn, until none has more to delete."""
        unfinished = [source for source in sources if source.retention is not None]
        while unfinished and not self._stopping.is_set():
            unfinished = [source for source in unfinished if self._retain(source)]

    def _is_time(self, source: str) -> bool:
        counted_ms = self._counted_at_ms.get(source)
        every_ms = self._options.gauges_ms if source in self._busy else self._options.gauges_idle_ms
        return counted_ms is None or self._clock.monotonic_ms() - counted_ms >= every_ms

    def _count(self, source: Source) -> None:
        self._counted_at_ms[source.name] = self._clock.monotonic_ms()
        self._busy.discard(source.name)
        try:
            self._metrics.set_counts(source.name, source.counts(), now_seconds=self._clock.now_ms() / 1_000)
        except OutboxError as error:
            self._metrics.record_task_failure("gauges")
            logger.warning("count_failed", extra={"source": source.name, "error": str(error)})

    def _retain(self, source: Source) -> bool:
        """Run one round; returns whether there is more to delete."""
        if source.retention is None or self._stopping.is_set():
            return False
        try:
            purged = source.retention.run(stopping=self._stopping)
        except OutboxError as error:
            self._metrics.record_task_failure("retention")
            logger.warning("retention_failed", extra={"source": source.name, "error": str(error)})
            return False
        self._metrics.record_purge(purged)
        if purged:
            logger.info(
                "retention_done",
                extra={
                    "source": source.name,
                    "archive_rows": purged.archive_rows,
                    "inbox_rows": purged.inbox_rows,
                    "order_heads": purged.order_heads,
                },
            )
        return purged.more
