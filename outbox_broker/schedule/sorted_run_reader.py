"""Reads runs from their segments through bounded caches. Changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.sorted_run import Columns, SortedRun, Spare, StoredRun, decode_columns, decode_messages
from outbox_broker.segments.port import RecordDamaged, SegmentReader, read_record
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

COLUMNS_CACHED_MAX: Final = 256
MESSAGES_CACHED_BYTES_MAX: Final = 16 * 1024 * 1024


class RunDamaged(SegmentDamaged):
    """A run has damage that is not known to be lost yet: some of its messages (`lost`), or all (None)."""

    def __init__(self, run: SortedRun, why: SegmentDamaged, *, lost: list[int] | None = None) -> None:
        super().__init__(str(why))
        self.run = run
        self.lost = lost


class RunReader:
    """Columns and messages of runs. Used under the schedule's lock. Raises RunDamaged and StorageFailed."""

    def __init__(self, segments: SegmentReader, state: ScheduleState) -> None:
        self._segments = segments
        self._state = state
        self._columns: OrderedDict[int, Columns] = OrderedDict()
        self._messages: OrderedDict[int, tuple[int, StoredRun]] = OrderedDict()
        self._messages_bytes = 0

    def columns(self, run: SortedRun) -> Columns:
        """Returns due times, arrival numbers and topics of a run."""
        found = self._columns.get(run.id)
        if found is None:
            found = self._columns[run.id] = self.read_columns(run)
            if len(self._columns) > COLUMNS_CACHED_MAX:
                self._columns.popitem(last=False)
        else:
            self._columns.move_to_end(run.id)
        return found

    def read_columns(self, run: SortedRun) -> Columns:
        """Like columns(), bypassing the cache, thread-safe; damaged columns are read from the run's spare."""
        try:
            return decode_columns(read_record(self._segments, run.columns_place()))
        except SegmentDamaged as damage:
            logger.warning("run_read_from_spare", extra={"segment": run.segment, "run": run.id, "error": str(damage)})
            return self._spare(run, damage).columns()

    def messages(self, run: SortedRun) -> StoredRun:
        """Returns all messages of a run."""
        found = self._messages.get(run.id)
        if found is None:
            messages = self.read_messages(run)
            self._keep(run, messages)
            return messages
        self._messages.move_to_end(run.id)
        return found[1]

    def read_messages(self, run: SortedRun) -> StoredRun:
        """Like messages(), bypassing the cache, thread-safe; messages known to be lost are empty."""
        try:
            return decode_messages(read_record(self._segments, run.messages_place()))
        except RecordDamaged as damage:
            found, lost = self._spare(run, damage).salvage(damage.found)
            bucket = self._state.bucket_of.get(run.id)
            start = 0 if bucket is None or bucket.handed else run.taken  # delivered messages are not needed
            missed = [index for index in lost if index >= start and not run.is_gone(index)]
            if missed:
                raise RunDamaged(run, damage, lost=missed) from damage
            return found

    def _spare(self, run: SortedRun, damage: SegmentDamaged) -> Spare:
        try:
            return Spare(read_record(self._segments, run.spare_place()))
        except SegmentDamaged:
            raise RunDamaged(run, damage) from damage

    def forget(self, run: SortedRun) -> None:
        """Drop a run from the caches."""
        self._columns.pop(run.id, None)
        size, _ = self._messages.pop(run.id, (0, None))
        self._messages_bytes -= size

    def _keep(self, run: SortedRun, messages: StoredRun) -> None:
        self._messages[run.id] = (run.messages_bytes, messages)
        self._messages_bytes += run.messages_bytes
        while self._messages_bytes > MESSAGES_CACHED_BYTES_MAX and len(self._messages) > 1:
            _, (size, _) = self._messages.popitem(last=False)
            self._messages_bytes -= size
