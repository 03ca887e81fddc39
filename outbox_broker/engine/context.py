"""What every part of the engine stands on: the lock, the two logs, the state, who waits for what. No verbs of users.

The one rule: an action is written down, then done, by the very code that replays it.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.group.consumer_group import Death, DeathCause, Group
from outbox_broker.log.consume_log import RUN_BYTES_MAX, RUN_MESSAGES_MAX
from outbox_broker.log.disk_reserve import Reserve, cure_for, may_pass
from outbox_broker.log.folder_lock import FolderLock
from outbox_broker.log.frame_pieces import PIECE_BYTES, Piece, pieces
from outbox_broker.log.segment_index import IndexFiles, write_index
from outbox_broker.log.segmented_log import SegmentedLog
from outbox_broker.log.storage import Storage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.state import checkpoint
from outbox_broker.state.engine_state import BrokerState, Topic, settings_of
from outbox_broker.state.topic_quota import TopicQuota
from outbox_core.common.clock import Clock
from outbox_core.common.errors import GroupDeleted, InvalidMessage, StorageFailed
from outbox_core.journal import journal
from outbox_core.journal.order_records import Filed
from outbox_core.messages.message import GroupConfig, check_group, check_topic
from outbox_core.runtime.evidence_watermark import JudgedGuard

logger = logging.getLogger(__name__)

DEATH_PUT_OFF_MS: Final = 60_000
"""What should be a dead letter, and finds no room, is looked at again after this time."""
DEATHS_AT_ONCE_MAX: Final = 100
"""So many become dead letters before it is asked again whether there is room: each may have a long history."""


def group_deleted(topic: str, group: str) -> GroupDeleted:
    """What a pull ends with whose group was deleted meanwhile."""
    return GroupDeleted(f"the consumer group {group} of {topic} was deleted while the pull waited")


class EngineContext:
    """The shared half of an engine. Methods with an underscore are called under the lock."""

    _schedule: DelayStore
    """Opened with the engine."""

    def __init__(self, folder: Path, *, clock: Clock, options: EngineOptions, storage: Storage) -> None:
        """For open(), which is how an engine is made."""
        self._clock = clock
        self._options = options
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters: defaultdict[tuple[str, str], set[Callable[[], None]]] = defaultdict(set)
        self._short: set[tuple[str, str]] = set()  # groups that got less than there is, for want of room in hand
        self._waiting_groups: defaultdict[str, set[str]] = defaultdict(set)
        self._pulls_waiting: Counter[tuple[str, str]] = Counter()  # those with a thread each
        self.deletions = 0
        """How many times something was deleted: a pull that may wait notes it as it begins."""
        self._deleted_in: dict[tuple[str, str], int] = {}  # which deletion of these was the group's last
        self._index_files = IndexFiles(folder / "messages")
        self._state = BrokerState(options, self._index_files)
        self._folder = folder
        self._storage = storage
        self._folder_lock = FolderLock(folder)
        self._firing_from: int | None = None
        """Where the copies of the batch begin that the schedule does not know to be placed yet."""
        self._reserve = Reserve(folder / "reserve", size_bytes=options.reserve_bytes)
        self._closed = False
        self._looked_at_ms = clock.monotonic_ms()
        self._judged = None if options.judged_file is None else JudgedGuard(options.judged_file, clock=clock)
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
            self._waiting_groups[topic].add(group)
            self._changed.notify_all()

        def unsubscribe() -> None:
            with self._lock:
                self._waiters[place].discard(wake)
                if not self._waiters[place]:
                    del self._waiters[place]
                    self._waiting_groups[topic].discard(group)
                if not self._waiting_groups[topic]:
                    del self._waiting_groups[topic]

        return unsubscribe

    def _wake(self, topic: str, group: str) -> None:
        with self._changed:
            self._changed.notify_all()  # its visible times may be others than the timer thinks
        self._wake_waiters(topic, group)

    def _wake_waiters(self, topic: str, group: str) -> None:
        with self._lock:
            wakes = list(self._waiters.get((topic, group), ()))
        for wake in wakes:
            wake()

    def _wake_topic(self, topic: str) -> None:
        with self._lock:
            groups = list(self._waiting_groups.get(topic, ()))
        for name in groups:
            self._wake(topic, name)

    def _wake_next(self, topic: str, group: Group) -> None:
        """After a settlement: the next of its keys may go, and there is room for who got less than there is."""
        if group.order is not None:
            self._wake(topic, group.name)
        self._wake_short()

    def _wake_short(self) -> None:
        """There is room in hand: wake who got less than there is."""
        short, self._short = self._short, set()
        for place in short:
            self._wake(*place)

    def _room_in_hand(self, topic: str, group: Group, *, wanted: int, again: Sequence[tuple[int, int]]) -> int:
        """How many fresh messages a group may be handed beside those that it gets again, up to those wanted; woken for
        others when there is room.

        What waits for another attempt takes room of its own group alone, and what waits for its redrive takes none: so
        no group's retries keep the others from theirs, however long they are put off. Nor do other groups' consumers:
        `group_in_hand_min` is a group's own, whatever all others hold.
        """
        options = self._options
        back, redriven = group.returning(again)
        own = options.group_in_hand_min - group.unsettled.in_flight - back
        room = min(
            options.group_in_hand_max - group.unsettled.handed_out - redriven,
            max(options.in_hand_max - self._state.in_hand.count - back, own),
        )
        if room < wanted:
            self._short.add((topic, group.name))
        return min(wanted, max(room, 0))

    def _wake_wanting(self, topics: Iterable[str]) -> None:
        """After a publish: wake the groups that want something of what is new, by the index of their filters."""
        with self._lock:
            places = [
                (topic, name) for topic in topics if topic in self._waiting_groups for name in self._wanting(topic)
            ]  # fmt: skip
        for place in places:
            self._wake_waiters(*place)

    def _wanting(self, topic: str) -> list[str]:
        """The groups that wait, and want something of what is new."""
        groups = list(self._waiting_groups[topic])
        known = self._state.topics.get(topic)
        if known is None or known.wanted is None:
            return groups
        return known.wanted.to_wake(groups, durable_end=self._messages.durable_end, end=known.index.end)

    def _tell_wanted(self, topic: str, records: Sequence[journal.MessageRecord]) -> None:
        """Hold what was published on a topic, and has its places, against its filters."""
        wanted = self._state.topic(topic).wanted
        if wanted is not None:
            wanted.published(records[0].sequence or 0, [one.headers for one in records], log_end=self._messages.end)

    def _come_past(self, topic: Topic, group: Group) -> None:
        """Have a group come past what its filter did not take as it was published."""
        self._count_filtered(topic.index.name, group.name, topic.come_past(group))

    def _count_filtered(self, topic: str, group: str, count: int) -> None:
        if count:
            self._state.counters["filtered", topic, group] += count

    # -- acting ------------------------------------------------------------------------------------------------------

    def _act(self, action: journal.Action) -> None:
        """Write an action down, then do it, by the very code that replays it."""
        self._write_action(action)
        self._state.replay_action(action)

    def _write_action(self, action: journal.Action) -> None:
        """Write an action down; in a new segment, behind a checkpoint, where the old one is full."""
        if self._actions.is_full:
            self._write_checkpoint_if_possible()
        payloads = [journal.encode_record(action)]
        self._reserve.spend(lambda: self._actions.append(payloads))

    def _write_checkpoint_if_possible(self) -> None:
        """Begin a segment with a checkpoint; where there is no room for it, actions go on in the old one."""
        try:
            self._write_checkpoint()
        except StorageFailed as error:
            if not may_pass(error):
                raise
            self._actions.put_off_roll()
            logger.warning("checkpoint_put_off", extra={"error": str(error)})

    def _write_checkpoint(self) -> None:
        """Begin a segment of actions with all that those before it have come to.

        The messages that it stands on are durable before it is written, so it is never ahead of them.
        """
        self._messages.commit()
        self._schedule.commit()
        messages_end = self._messages.durable_end if self._firing_from is None else self._firing_from
        records = checkpoint.records_of(self._state, messages_end=messages_end, at_ms=self._clock.now_ms())
        try:
            self._actions.roll(records)
        except OSError as error:
            raise StorageFailed(f"cannot begin a segment: {error.strerror}; {cure_for(error)}") from error

    def _write_messages(
        self, counts: Mapping[str, int], records: Sequence[journal.MessageRecord], *, ready_at_ms: int
    ) -> None:
        """Append records, all with sequences, as one piece, and place them: topics in order, so many of each."""
        encode = journal.encode_record
        is_long = sum([len(one.body) for one in records]) > PIECE_BYTES
        framed = pieces(map(encode, records)) if is_long else [journal.frames([encode(one) for one in records])]
        self._place(counts, self._append_messages(framed), ready_at_ms=ready_at_ms)
        if self._state.is_filtering:
            start = 0
            for topic, count in counts.items():
                self._tell_wanted(topic, records[start : start + count])
                start += count

    def _place(self, counts: Mapping[str, int], offsets: Sequence[int], *, ready_at_ms: int) -> None:
        """Give what was appended its places: topics in order, so many messages each."""
        ends = [*offsets[1:], self._messages.end]
        durable_end, place = self._messages.durable_end, self._state.place
        start = 0
        for topic, count in counts.items():
            end = start + count
            while start < end:
                # The run ends behind the message that reaches the bound of its bytes, or of its messages.
                stop = end if count == 1 else bisect_left(ends, offsets[start] + RUN_BYTES_MAX, start) + 1
                stop = min(stop, start + RUN_MESSAGES_MAX, end)
                place(
                    topic, stop - start, offsets[start], ends[stop - 1] - offsets[start],
                    ready_at_ms=ready_at_ms, sealed_end=durable_end,
                )  # fmt: skip
                start = stop

    def _append_messages(self, framed: Iterable[Piece]) -> list[int]:
        """Append message records in frames behind each other, in a new segment where the old one is full."""
        try:
            if self._messages.is_full:
                self._seal_message_segment()
            return self._messages.append_pieces(framed)
        except OSError as error:
            raise StorageFailed(f"cannot write to the log: {error.strerror}; {cure_for(error)}") from error

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
        """Make dead letters; where there is no room for them, they wait for it, and are handed to nobody."""
        for start in range(0, len(deaths), DEATHS_AT_ONCE_MAX):
            if self._state.dead_weight.size_bytes >= self._options.dead_letters_bytes_max:
                self._put_off(topic, group, deaths[start:], at_ms=at_ms)
                return
            self._bury_all(topic, group, deaths[start : start + DEATHS_AT_ONCE_MAX], at_ms=at_ms)

    def _bury_all(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        alike: defaultdict[tuple[str, bool], list[tuple[int, journal.Ids, int]]] = defaultdict(list)
        for death in deaths:
            alike[death.reason, death.cause is DeathCause.EXPIRED].append((death.first, death.count, death.attempts))
        for (reason, expired), entries in alike.items():
            self._act(
                journal.Died(
                    topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason, expired=expired
                )
            )  # fmt: skip
        self._wake_next(topic, group)
        for death in deaths:
            self._state.counters[f"dead_lettered_{death.cause}", topic, group.name] += death.count

    def _put_off(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        alike: defaultdict[str, list[tuple[int, journal.Ids, int, int]]] = defaultdict(list)
        for one in deaths:
            alike[one.reason].append((one.first, one.count, at_ms + DEATH_PUT_OFF_MS, one.attempts))
        for reason, entries in alike.items():
            self._act(journal.Requeued(topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason))
        logger.warning(
            "dead_letters_full",
            extra={"topic": topic, "group": group.name, "messages": sum(one.count for one in deaths),
                   "cure": "redrive dead letters, or raise dead_letters_bytes_max"},
        )  # fmt: skip
        self._wake_short()  # no consumer holds them any more

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StorageFailed("the broker is closed")

    def _refuse_if_deleted(self, topic: str, group: str, *, since: int | None) -> None:
        """Raise GroupDeleted where a group was deleted after so many deletions; None: nobody has waited."""
        if since is not None and self._deleted_in.get((topic, group), 0) > since:
            raise group_deleted(topic, group)

    # -- topics and groups -------------------------------------------------------------------------------------------

    def _declare(self, topic: str, name: str, config: GroupConfig, quota: TopicQuota | None = None) -> None:
        if topic not in self._state.topics:
            refused = self._topics_refused(1, quota)
            if refused is not None:
                raise InvalidMessage(refused)
        known = self._state.topic(topic)
        if name not in known.groups and len(known.groups) >= self._options.groups_per_topic_max:
            raise InvalidMessage(f"topic {topic} has {len(known.groups)} groups already (groups_per_topic_max)")
        match config.start:
            case "latest":
                position = self._durable_end(known)
            case "at":
                position = min(known.index.sequence_at(config.start_at_ms or 0), self._durable_end(known))
            case _:
                position = known.index.start
        self._settle_passed(known, name, config)
        self._act(
            journal.Declared(
                topic=topic, group=name, at_ms=self._clock.now_ms(), position=position, settings=settings_of(config),
                is_new=name not in known.groups,
            )
        )  # fmt: skip

    def _durable_end(self, topic: Topic) -> int:
        """Where a group may be moved to: behind it a power cut may give the sequences to other messages."""
        return topic.index.durable_end(self._messages.durable_end)

    def _settle_passed(self, topic: Topic, name: str, config: GroupConfig) -> None:
        """Write down what a group has passed by its filter, before it gets another one."""
        group = topic.groups.get(name)
        if group is None or group.accepts is None or group.config.filter == config.filter:
            return
        self._come_past(topic, group)
        self._messages.commit()  # no position may be ahead of the messages
        self._act(
            Filed(
                topic=topic.index.name, group=name, at_ms=self._clock.now_ms(), position=group.position, runs=[]
            )
        )  # fmt: skip

    def _topics_refused(self, more: int, quota: TopicQuota | None) -> str | None:
        """Why there may not be so many topics more, all of them covered by a client's quota; None where there may."""
        limit = self._options.topics_max
        if len(self._state.topics) + more > limit:
            return f"there are {limit} topics already, and no more are allowed (topics_max)"
        if quota is None:
            return None
        limit = quota.limit(limit)
        if self._state.coverage.count(quota.patterns) + more > limit:
            return (
                f"the token's patterns cover {limit} topics already, and it may have no more (topics_max of the token)"
            )
        return None

    def _open_group(self, topic: str, name: str, quota: TopicQuota | None = None) -> tuple[Topic, Group]:
        found = self._state.group(topic, name)
        if found is None:
            self._declare(topic, name, GroupConfig(), quota)
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
