"""Replays the action log after damage: messages that a group passed by a lost action are made deliverable again.

After damage in the action log, an action that advances a group over messages which it does not list implies a lost
action before it: most likely a delivery. Its messages are redelivered, rather than lost. Those of an ordered group are
then outside its key order, like redriven ones. This is logged, and durable with the group's next checkpoint; until then
each start finds it again. The broker opens all the same: its messages are whole, and consumers must bear duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox_broker.group.consumer_group import Group
from outbox_broker.group.in_flight import InFlightRun
from outbox_broker.log.message_reader import read_runs
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.state.engine_state import BrokerState
from outbox_core.common.errors import StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.order_records import Filed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_LOOK_MESSAGES: Final = 1_000
"""How many messages are read at a time, to apply a group's filter."""
Range = tuple[int, int]


class LostActions:
    """Replays what follows damage in the action log."""

    def __init__(self, state: BrokerState, messages: SegmentedLog) -> None:
        self._state = state
        self._messages = messages

    def replay(self, action: journal.Action) -> None:
        """Replay an action, and reopen messages over which it advances the group without listing them."""
        named = _named(action)
        if named is None:
            self._state.replay_action(action)
            return
        topic, name, ranges = named
        group = self._state.group(topic, name)
        before = 0 if group is None else group.position
        self._state.replay_action(action)
        if group is not None:
            for first, end in _beside(before, group.position, ranges):
                self._open_again(topic, group, first, end)

    def _open_again(self, topic: str, group: Group, first: int, end: int) -> None:
        count = 0
        for low, high in self._wanted(topic, group, first, end):
            group.unsettled.add(InFlightRun(low, high, 0, 0, 0, group.generation, in_flight=False))
            count += high - low
        if count:
            logger.error("lost_action", extra={"topic": topic, "group": group.name, "messages_again": count})

    def _wanted(self, topic: str, group: Group, first: int, end: int) -> Iterator[Range]:
        """Returns the sequences that match the group's filter, as ranges; unreadable ones count as matching."""
        index = self._state.topic(topic).index
        if group.accepts is None:
            yield first, end
            return
        start = max(first, index.start)
        while start < end:
            stop = min(start + _LOOK_MESSAGES, end)
            try:
                runs = list(index.runs(start, stop))
                records = read_runs(self._messages, runs, first=start, end=stop, bytes_max=1 << 62)
            except StorageFailed:  # the index is damaged, too
                yield start, stop
            else:
                yield from (
                    (sequence, sequence + 1)
                    for sequence, record in records
                    if record is None or group.accepts(record.headers)
                )
            start = stop


def _named(action: journal.Action) -> tuple[str, str, list[Range]] | None:
    """Returns topic, group, and the sequences that an action lists; None if it does not advance a group by itself."""
    match action:
        case journal.Handed():
            ranges = [(run.first, run.first + run.count) for run in action.runs]
        case journal.Settled():
            ranges = [(first, first + count) for first, count in action.runs]
        case journal.Requeued():
            ranges = [(first, first + count) for first, count, _, _ in action.entries]
        case journal.Died():
            ranges = [(first, first + count) for first, count, _ in action.entries]
        case Filed():
            ranges = [(first, first + len(keys)) for first, keys in action.runs]
        case _:
            return None
    return action.topic, action.group, ranges


def _beside(first: int, end: int, named: Sequence[Range]) -> Iterator[Range]:
    """Yields the parts of first to end (exclusive) that are in none of the ranges."""
    start = first
    for low, high in sorted(named):
        if low > start:
            yield start, min(low, end)
        start = max(start, high)
        if start >= end:
            return
    if start < end:
        yield start, end
