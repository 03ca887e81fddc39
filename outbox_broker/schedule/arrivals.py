"""Where messages are written as they arrive: to the schedule's own log, or to one that its owner keeps anyway.

In its own log an arrival stands between the changes, in order. In another log it has an arrival number, by which the
changes name it: a replay has all that arrived before a number as soon as a change names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from outbox_broker.journal.journal import Journal
from outbox_broker.schedule.schedule_log import Place, append
from outbox_broker.schedule.schedule_records import Scheduled
from outbox_broker.schedule.sorted_run import ID, TOPIC, Entry, TimedMessage


class ArrivalLog(Protocol):
    """A log to which messages are appended as they arrive."""

    @property
    def end(self) -> Place:
        """The offset behind all that arrived. Under the schedule's lock."""

    def append(self, entries: Sequence[Entry], dead: Sequence[TimedMessage], *, at_ms: int) -> None:
        """Append messages that arrive together, and those among them that were canceled before; under the schedule's
        lock. Not durable before commit(). Raises StorageFailed with nothing appended.
        """

    def commit(self, end: Place) -> None:
        """Return once all that arrived up to this offset is durable. Raises StorageFailed."""

    def since(self, begin: Place) -> Iterator[Scheduled]:
        """Yields what arrived from an offset on, in order, if it is not in the schedule's own log. Raises
        StorageFailed.
        """


class OwnArrivals:
    """The schedule's own log, as the one to which messages are appended."""

    def __init__(self, log: Journal) -> None:
        self._log = log

    @property
    def end(self) -> Place:
        """The end of the log."""
        return self._log.end

    def append(self, entries: Sequence[Entry], dead: Sequence[TimedMessage], *, at_ms: int) -> None:
        """Append a record; it has no time."""
        del at_ms
        append(self._log, Scheduled(list(entries), list(map(ID, dead)), list(map(TOPIC, dead))))

    def commit(self, end: Place) -> None:
        """Commit the log."""
        self._log.commit(end)

    def since(self, begin: Place) -> Iterator[Scheduled]:
        """Yields nothing: they stand between the changes."""
        del begin
        return iter(())


class ArrivalsInOrder:
    """What arrived in another log, as changes ask for it."""

    def __init__(self, arrivals: Iterator[Scheduled], *, next_number: int) -> None:
        """`next_number`: of the first that arrived behind the checkpoint."""
        self._arrivals = arrivals
        self._next_number = next_number

    def before(self, number: int | None = None) -> Iterator[Scheduled]:
        """Yields those that were not yielded yet, until all with a lower number were; all of them, by default."""
        while number is None or self._next_number < number:
            arrived = next(self._arrivals, None)
            if arrived is None:
                return
            if arrived.entries:
                self._next_number = arrived.entries[-1].seq + 1
            yield arrived
