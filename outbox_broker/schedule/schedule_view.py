"""The messages and cancels of a schedule that another process owns, read from its segments. Changes nothing.

A message counts as waiting until the log says that its batch was delivered. So a message that is being handed over is
seen here, in the target, or in both, never in neither, if the target is read afterwards.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from outbox_broker.journal.replay import JournalReplay
from outbox_broker.schedule.recent_cancels import Cancel
from outbox_broker.schedule.schedule_log import LOG, records_of
from outbox_broker.schedule.schedule_records import FROM_MEMORY, Quarantined
from outbox_broker.schedule.schedule_state import ScheduleState
from outbox_broker.schedule.sorted_run import Entry, SortedRun, TimedMessage
from outbox_broker.schedule.sorted_run_reader import RunDamaged, RunReader
from outbox_broker.segments.port import SegmentReader

_PAGE: Final = 1_000


class ScheduleView:
    """A schedule as its log was when this was made."""

    def __init__(self, segments: SegmentReader, *, cancels_max: int) -> None:
        """Read the log. Raises SegmentDamaged if no whole checkpoint is there, StorageFailed."""
        self._state = _state_of(segments, cancels_max=cancels_max)
        self._reader = RunReader(segments, self._state)

    def cancels(self) -> Sequence[Cancel]:
        """Returns the cancels that the schedule remembers."""
        return self._state.canceled.stored()

    def waiting(self, *, damaged: Container[int]) -> Iterator[list[TimedMessage]]:
        """Yields the messages that are neither canceled nor known to be delivered, in no order.

        `damaged`: ids of runs that are known to be damaged; what cannot be verified of them is left out, as the owner
        does. Raises RunDamaged for others: the segment may have been deleted meanwhile, which looks alike.
        """
        entries = [*self._state.pending.values()]
        for out in self._state.hand_outs.values():
            entries += (entry for seq, entry in out.entries.items() if seq not in out.done)
        for start in range(0, len(entries), _PAGE):
            yield [_timed(entry) for entry in entries[start : start + _PAGE]]
        handed = self._handed()
        for bucket in list(self._state.buckets.values()):
            for run in list(bucket.runs.values()):
                parts = [*handed.get(run.id, ()), (run.taken, run.count)]
                if any(start < stop for start, stop in parts):
                    yield self._waiting_in(run, parts, damaged=damaged)

    def _waiting_in(
        self, run: SortedRun, parts: Sequence[tuple[int, int]], *, damaged: Container[int]
    ) -> list[TimedMessage]:
        try:
            columns = self._reader.read_columns(run)
            stored = self._reader.read_messages(run)
        except RunDamaged as found:
            if run.id not in damaged:
                raise
            if found.lost is None:
                return []
            self._state.apply(Quarantined(run.id, found.lost))
            return self._waiting_in(run, parts, damaged=damaged)
        done = {seq for out in self._state.hand_outs.values() for seq in out.done}
        return [
            TimedMessage(
                columns.due[index], stored.ids[index], columns.topics[columns.topic[index]], stored.payloads[index]
            )
            for start, stop in parts
            for index in range(start, stop)
            if not run.is_gone(index) and columns.seq[index] not in done
        ]

    def _handed(self) -> dict[int, list[tuple[int, int]]]:
        """Returns the parts of each run that are handed over and not settled."""
        found: dict[int, list[tuple[int, int]]] = {}
        for out in self._state.hand_outs.values():
            for run_id, start, stop in out.parts:
                if run_id != FROM_MEMORY:
                    found.setdefault(run_id, []).append((start, stop))
        return found


def _state_of(segments: SegmentReader, *, cancels_max: int) -> ScheduleState:
    """Replay the log from its newest whole checkpoint."""
    state = ScheduleState(cancels_max=cancels_max)
    for record in records_of(JournalReplay(segments, LOG)):
        state.apply(record)
    return state


def _timed(entry: Entry) -> TimedMessage:
    return TimedMessage(entry.due_ms, entry.id, entry.topic, entry.payload)
