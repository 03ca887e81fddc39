"""The schedule's log: records of changes, in segments that begin with a checkpoint. Makes no decisions.

Scheduling and dispatch share one log, so that their relative order is given by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from outbox_broker.log.disk_reserve import is_disk_full
from outbox_broker.schedule import schedule_records
from outbox_broker.segments.segment_store import Record, SegmentStore
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

PREFIX: Final = "log-"
Place = tuple[str, int]
"""The end of a record: the segment and the position in it."""


class ScheduleLog:
    """One log. append() and begin() need the caller's lock; commit() is thread-safe, and shares syncs."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._number = 0
        self._end = 0
        self._begun = 0
        self._grown_bytes = 0
        self._old: list[str] = []
        self._durable: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def name(self) -> str:
        """The active segment."""
        return f"{PREFIX}{self._number:012d}"

    @property
    def place(self) -> Place:
        """The current end of the log."""
        return self.name, self._end

    @property
    def grown_bytes(self) -> int:
        """Bytes of the records after the checkpoint, without the store's overhead: positions belong to the store, and
        need not be bytes.
        """
        return self._grown_bytes

    @property
    def is_dirty(self) -> bool:
        """Whether something was appended that is not durable yet."""
        return self._durable.get(self.name, 0) < self._end

    def recover(self) -> Iterator[schedule_records.LogRecord]:
        """Yields every record since the newest whole checkpoint; none in an empty store. Must be exhausted.

        Raises SegmentDamaged if that checkpoint is damaged, or any record but the last.
        """
        names = [name for name in self._store.list() if name.startswith(PREFIX)]
        while names:
            found = self._store.scan(names[-1])
            first = next(found, None)
            if first is not None and isinstance(
                decoded := schedule_records.decode(first.payload), schedule_records.ScheduleCheckpoint
            ):
                self._number = int(names[-1].removeprefix(PREFIX))
                self._old = names[:-1]
                yield decoded
                yield from self._follow(first, found)
                return
            if len(names) == 1 and names[0] != f"{PREFIX}{1:012d}":
                # Its predecessor was deleted only after its checkpoint was durable: it was whole.
                raise SegmentDamaged(f"{names[0]}: its checkpoint is damaged; restore {names[0]} from a copy")
            logger.warning("unfinished_log_removed", extra={"segment": names[-1]})
            self._store.delete([names.pop()])

    def append(self, record: schedule_records.LogRecord) -> Place:
        """Append a record; not durable before commit(). Raises StorageFailed with nothing appended."""
        payload = schedule_records.encode(record)
        *_, end = self._store.append(self.name, [payload], position=self._end)
        self._end = end
        self._grown_bytes += len(payload)
        return self.place

    def commit(self, place: Place | None = None) -> None:
        """Return once everything up to a place (all, by default) is durable."""
        with self._guard:
            name, end = place or (self.name, self._end)
            if name < self.name:  # a later segment's checkpoint includes all of an earlier one
                name, end = self.name, self._begun
            if self._durable.get(name, 0) >= end:
                return
            written = self._end
        self._store.sync([name])
        with self._guard:
            if name == self.name:
                self._durable[name] = max(self._durable.get(name, 0), written)

    def seal(self) -> None:
        """Accept no more records; marks the durable end."""
        self._store.seal(self.name)

    def check_ready(self) -> None:
        """Raise StorageFailed if the store refuses writes until it is reopened."""
        self._store.sync(())

    def begin(self, checkpoint: schedule_records.ScheduleCheckpoint) -> None:
        """Start a new segment; once it is durable, the older ones are obsolete. Raises StorageFailed.

        If that fails, the log continues in the old segment.
        """
        name = f"{PREFIX}{self._number + 1:012d}"
        try:
            *_, end = self._store.append(name, [schedule_records.encode(checkpoint)], position=0)
        except StorageFailed:
            self._store.delete([name])
            raise
        with self._guard:
            if self._number:
                self._old.append(self.name)
            self._number += 1
            self._end = self._begun = end
            self._grown_bytes = 0
            self._durable = {}

    def resume(self, checkpoint: Callable[[], schedule_records.ScheduleCheckpoint]) -> None:
        """Go on after recovery: in the recovered segment, if its store says that all of it is durable, so that the time
        until this log can be written to does not depend on what it holds; else in a new one. Raises StorageFailed.
        """
        if self._number and self._store.continues(self.name):
            with self._guard:
                self._durable = {self.name: self._end}
        else:
            self.begin_anew(checkpoint())

    def begin_anew(self, checkpoint: schedule_records.ScheduleCheckpoint) -> None:
        """Start a new segment, durably, after recovery: of what was read, only what is written again is proven to be
        durable.

        Without space for it the log continues in the old segment, if there is one. Raises StorageFailed.
        """
        try:
            self.begin(checkpoint)
        except StorageFailed as failure:
            if not (self._number and is_disk_full(failure)):
                raise
            logger.warning("schedule_log_not_verified", extra={"cure": "free some disk space, and restart"})
        self.commit()

    def old_segments(self) -> list[str]:
        """Returns the segments that may be deleted; each is returned once."""
        old, self._old = self._old, []
        return old

    def _follow(self, first: Record, found: Iterator[Record]) -> Iterator[schedule_records.LogRecord]:
        self._end = self._begun = first.end
        self._grown_bytes = 0
        for one in found:
            self._end = one.end
            self._grown_bytes += len(one.payload)
            yield schedule_records.decode(one.payload)
