"""What every part of the engine stands on: the lock, the two logs, the state, who waits for what. No verbs of users.

The one rule: an action is written down, then done, by the very code that replays it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from broker import checkpoint
from broker.consume.group import Death, Group
from broker.consume.topic import RUN_BYTES_MAX, RUN_MESSAGES_MAX
from broker.log.folder_lock import FolderLock
from broker.log.reserve import Reserve, is_disk_full
from broker.log.segment_index import IndexFiles, write_index
from broker.log.segmented_log import SegmentedLog
from broker.log.storage import Storage
from broker.options import EngineOptions
from broker.state import BrokerState, Topic, settings_of
from messaging import journal
from messaging.clock import Clock
from messaging.errors import InvalidMessage, StorageFailed
from messaging.message import GroupConfig, check_group, check_topic


class Core:
    """The shared half of an engine. Methods with an underscore are called under the lock."""

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For open(), which is how an engine is made."""
        self._clock = clock
        self._options = options
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters: defaultdict[tuple[str, str], set[Callable[[], None]]] = defaultdict(set)
        self._index_files = IndexFiles(folder / "messages")
        self._state = BrokerState(options, self._index_files)
        self._folder = folder
        self._folder_lock = FolderLock(folder)
        self._reserve = Reserve(folder / "reserve", size_bytes=options.reserve_bytes)
        self._closed = False
        self._looked_at_ms = clock.monotonic_ms()
        self._messages, self._actions = (
            SegmentedLog(
                folder / name, kind=kind, segment_bytes=segment_bytes, durability=options.durability,
                storage=storage, now_ms=clock.now_ms,
            )
            for name, kind, segment_bytes in (
                ("messages", journal.SegmentKind.MESSAGES, options.segment_bytes),
                ("actions", journal.SegmentKind.ACTIONS, min(options.segment_bytes, options.checkpoint_bytes)),
            )
        )  # fmt: skip

    # -- waiting -----------------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, group: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called, from any thread, whenever something may have become ready for a group; returns the
        undo.
        """
        place = (topic, group)
        with self._changed:
            self._waiters[place].add(wake)
            self._changed.notify_all()

        def unsubscribe() -> None:
            with self._lock:
                self._waiters[place].discard(wake)
                if not self._waiters[place]:
                    del self._waiters[place]

        return unsubscribe

    def _wake(self, topic: str, group: str) -> None:
        with self._lock:
            wakes = list(self._waiters.get((topic, group), ()))
            self._changed.notify_all()
        for wake in wakes:
            wake()

    def _wake_topic(self, topic: str) -> None:
        with self._lock:
            groups = [name for on_topic, name in self._waiters if on_topic == topic]
        for name in groups:
            self._wake(topic, name)

    # -- acting ------------------------------------------------------------------------------------------------------

    def _act(self, action: journal.Written) -> None:
        """Write an action down, then do it, by the very code that replays it."""
        self._write_action(action)
        self._state.replay_action(action)

    def _write_action(self, action: journal.Written) -> None:
        """Write an action down; in a new segment, behind a checkpoint, where the old one is full."""
        try:
            self._try_to_write_action(action)
        except StorageFailed as error:
            if not is_disk_full(error) or not self._reserve.let_go():
                raise
            self._try_to_write_action(action)

    def _try_to_write_action(self, action: journal.Written) -> None:
        if self._actions.is_full:
            self._write_checkpoint()
        self._actions.append([journal.encode_record(action)])

    def _write_checkpoint(self) -> None:
        """Begin a segment of actions with all that those before it have come to.

        The messages that it stands on are durable before it is written, so it is never ahead of them.
        """
        self._messages.commit()
        records = checkpoint.records_of(
            self._state, messages_end=self._messages.durable_end, at_ms=self._clock.now_ms()
        )
        try:
            self._actions.roll()
        except OSError as error:
            raise StorageFailed(f"cannot begin a segment: {error.strerror}; free some disk space") from error
        self._actions.append(records)

    def _write_messages_of(self, topic: str, records: Sequence[journal.MessageRecord], *, ready_at_ms: int) -> None:
        """Append records of one topic, all with sequences, as one piece, and place them."""
        offsets = self._append_messages(records)
        ends = [*offsets[1:], self._messages.end]
        durable_end, count, start = self._messages.durable_end, len(records), 0
        while start < count:
            # A run ends behind the message that reaches a bound.
            full = bisect_left(ends, offsets[start] + RUN_BYTES_MAX, start) + 1
            stop = min(full, start + RUN_MESSAGES_MAX, count)
            self._state.place(
                topic, stop - start, offsets[start], ends[stop - 1] - offsets[start], ready_at_ms=ready_at_ms,
                sealed_end=durable_end,
            )  # fmt: skip
            start = stop

    def _append_messages(self, records: Sequence[journal.MessageRecord]) -> list[int]:
        try:
            if self._messages.is_full:
                self._seal_message_segment()
            encode = journal.encode_record
            return self._messages.append([encode(record) for record in records])
        except OSError as error:
            raise StorageFailed(f"cannot write to the log: {error.strerror}; free some disk space") from error

    def _write_messages(self, records: Sequence[journal.MessageRecord]) -> list[int]:
        """Append message records as one piece, and place those that have a sequence; returns the records' offsets."""
        offsets = self._append_messages(records)
        place, count, start = self._state.place, len(records), 0
        durable_end = self._messages.durable_end
        ends = [*offsets[1:], self._messages.end]
        while start < count:
            topic, stop, until = records[start].topic, start + 1, min(count, start + RUN_MESSAGES_MAX)
            if records[start].sequence is None:
                start = stop
                continue
            while (
                stop < until
                and (following := records[stop]).topic == topic
                and following.sequence is not None
                and ends[stop - 1] - offsets[start] < RUN_BYTES_MAX
            ):
                stop += 1
            place(
                topic, stop - start, offsets[start], ends[stop - 1] - offsets[start],
                ready_at_ms=records[start].stored_at_ms, sealed_end=durable_end,
            )  # fmt: skip
            start = stop
        return offsets

    def _seal_message_segment(self) -> None:
        """Write the index of the segment that is full, then begin a new one."""
        segment, state = self._messages.segments[-1], self._state
        directory = write_index(
            self._folder / "messages", segment.first_offset, self._messages.end, topics=state.written.values(),
            ids=state.recent.newest(state.recent.added - state.recent_before_written),
            special=state.written_special.tolist(),
        )  # fmt: skip
        self._messages.roll()
        state.take_over(segment.first_offset, directory)

    def _bury(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        by_reason: defaultdict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for death in deaths:
            by_reason[death.reason].append((death.sequence, death.message_id, death.attempts))
        for reason, entries in by_reason.items():
            self._act(journal.Died(topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason))
        self._state.counters["dead_lettered", topic, group.name] += len(deaths)

    def _refuse_if_disk_is_full(self) -> None:
        if not self._reserve.take():
            raise StorageFailed(
                "No space left on device: the room that is left is for what is stored to be consumed; free some disk "
                "space, and publishes are taken again"
            )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the broker is closed")

    # -- topics and groups -------------------------------------------------------------------------------------------

    def _declare(self, topic: str, name: str, config: GroupConfig) -> None:
        if topic not in self._state.topics:
            self._check_topics_max()
        known = self._state.topic(topic)
        if name not in known.groups and len(known.groups) >= self._options.groups_per_topic_max:
            raise InvalidMessage(f"topic {topic} has {len(known.groups)} groups already (groups_per_topic_max)")
        match config.start:
            case "latest":
                position = known.index.end
            case "at":
                position = known.index.sequence_at(config.start_at_ms or 0)
            case _:
                position = known.index.start
        self._act(
            journal.Declared(
                topic=topic, group=name, at_ms=self._clock.now_ms(), position=position, settings=settings_of(config)
            )
        )

    def _check_topics_max(self) -> None:
        if len(self._state.topics) >= self._options.topics_max:
            raise InvalidMessage(self._too_many_topics)

    @property
    def _too_many_topics(self) -> str:
        return f"there are {self._options.topics_max} topics already, and no more are allowed (topics_max)"

    def _open_group(self, topic: str, name: str) -> tuple[Topic, Group]:
        found = self._state.group(topic, name)
        if found is None:
            self._declare(topic, name, GroupConfig())
            found = self._known_group(topic, name)
        return self._state.topic(topic), found

    def _known_topic(self, topic: str) -> Topic:
        check_topic(topic)
        found = self._state.topics.get(topic)
        if found is None:
            raise KeyError(f"there is no topic {topic}")
        return found

    def _known_group(self, topic: str, group: str) -> Group:
        check_group(group)
        found = self._known_topic(topic).groups.get(group)
        if found is None:
            raise KeyError(f"topic {topic} has no consumer group {group}")
        return found
