"""Quarantines damaged runs: their unreadable messages are never dispatched, and everything else continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from outbox_broker.schedule.schedule_context import ScheduleContext
from outbox_broker.schedule.schedule_records import Quarantined
from outbox_broker.schedule.sorted_run import SortedRun
from outbox_broker.schedule.sorted_run_reader import RunDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class RunQuarantine:
    """Logs which messages of a run are lost. Used under `lock`."""

    def __init__(self, context: ScheduleContext) -> None:
        self._context = context

    def add(self, damage: RunDamaged) -> None:
        """Log the lost messages of a run in a bucket. Raises StorageFailed with nothing changed."""
        run = damage.run
        lost = damage.lost
        waiting = [one for one in (range(run.count) if lost is None else lost) if one >= run.taken]
        waiting = [one for one in waiting if not run.is_gone(one)]
        logger.critical(
            "run_quarantined",
            extra={"segment": run.segment, "run": run.id, "messages": len(waiting), "error": str(damage)},
        )
        self._context.act(Quarantined(run.id, lost, self._topics_of(run, waiting)))
        self._context.reader.forget(run)

    def _topics_of(self, run: SortedRun, indexes: Sequence[int]) -> dict[str, int]:
        """Returns the number of these messages by topic; empty if that is unreadable too."""
        try:
            columns = self._context.reader.read_columns(run)
        except RunDamaged:
            return {} if run.topic is None else {run.topic: len(indexes)}
        return dict(Counter(columns.topics[columns.topic[index]] for index in indexes))
