"""In-memory state of the engine: topics, groups, recent ids; rebuilt from the logs.

Excludes the logs and the schedule. RecentIds remembers messages by topic and id, so that a repeated publish is
recognised.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import groupby, islice

import msgspec

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.filter import compile_condition, parse
from outbox_broker.group.consumer_group import Death, DeathCause, Group, Requeue
from outbox_broker.group.dead_letters import MemoryUse
from outbox_broker.group.failure_reasons import ReasonBudget
from outbox_broker.group.in_flight import InFlightCount
from outbox_broker.group.key_order import KeyOrder
from outbox_broker.group.subscription_matcher import SubscriptionMatcher
from outbox_broker.journal.message_reader import StoredMessage
from outbox_broker.journal.segment_footer import Footer, FoundFooter, footer_of
from outbox_broker.log.topic_index import BlockPlace, Blocks, TopicIndex
from outbox_broker.recurring.recurring_state import RecurringRegistry
from outbox_broker.state.client_topic_quota import Coverage
from outbox_broker.state.message_id_map import MessageIdMap
from outbox_core.common.rate_limit import RateLimit
from outbox_core.journal import journal
from outbox_core.journal.dead_letter_records import ClockStepped, Discarded, Edited, RedriveStopped
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic, PurgedTopic
from outbox_core.journal.order_records import Filed
from outbox_core.journal.recurring_records import AddedRecurring, DeletedRecurring, FiredRecurring, PausedRecurring
from outbox_core.messages.message import GroupConfig

_SETTINGS = tuple(setting.name for setting in fields(GroupConfig))


class Topic(msgspec.Struct, gc=False):
    """A topic's index and its groups; `matcher` is set if a group has, or had, a filter."""

    index: TopicIndex
    groups: dict[str, Group] = msgspec.field(default_factory=dict)
    matcher: SubscriptionMatcher | None = None

    def skip_filtered(self, group: Group) -> int:
        """Advances the group's position over messages its filter rejected at publish time; returns how many."""
        position_before = group.position
        if self.matcher is not None:
            group.position = self.matcher.position_after_filtered(group.name, position_before)
        return group.position - position_before


class Tombstone(msgspec.Struct, array_like=True, frozen=True):
    """Bounds of a deleted topic, kept as long as a log holds anything of it (see DeletedTopic)."""

    end: int
    scheduled_end: int
    messages_end: int
    actions_end: int


class BrokerState:
    """All in-memory state. Changed under the engine's lock, and by replay() before the engine is open."""

    def __init__(self, options: EngineOptions, blocks: Blocks) -> None:
        self._blocks = blocks
        self._options = options
        self.topics: dict[str, Topic] = {}
        self.deleted: dict[str, Tombstone] = {}
        """Deleted topics, including those created again since."""
        self.generation = 0
        """The generation in which a new group starts: above that of all deleted groups."""
        self.coverage = Coverage(self.topics)
        self.recent = RecentIds(options.dedup_messages_max)
        self.counters: Counter[tuple[str, str, str]] = Counter()
        self.recurring = RecurringRegistry()
        self.epoch = 0
        self.messages_end = 0
        """The end of the message log at the last opening that an action tells of."""
        self.latest_ms = 0
        """The wall clock's time at the last action."""
        self.in_flight_total = InFlightCount()
        self.dead_letter_memory = MemoryUse()
        self.reason_budget = ReasonBudget(options.reasons_bytes_max, options.group_reasons_bytes_min)
        self.is_filtering = False
        """Whether any group has, or had, a filter."""
        self.active_segment_topics: dict[str, TopicIndex] = {}
        """The topics with messages in the active segment."""
        self.active_segment_special = array("Q")
        """Offsets in it of messages that became due: its footer lists them, so that they are found again."""
        self.active_segment_footers: dict[int, int] = {}
        """The footers in it that were made anew: the first offset of each one's segment, and where it begins."""
        self.dispatched_before: dict[tuple[str, str], int] = {}
        """Sequences, by topic and id, of messages dispatched before a restart that the schedule will dispatch again."""
        self.dispatched_from: int | None = None
        """The offset of the first of those in the message log."""
        self.recent_before_written = 0
        """How many ids had been added when that segment was started."""

    def topic(self, name: str) -> Topic:
        """Returns the topic, created if it is new."""
        topic = self.topics.get(name)
        if topic is None:
            topic = Topic(TopicIndex(name, self._blocks))
            topic.index.begin_at(self.end_of(name))
            self.topics[name] = topic
            self.coverage.made(name)
        return topic

    def end_of(self, name: str) -> int:
        """Returns the sequence of the topic's next message, also for a new topic."""
        topic = self.topics.get(name)
        if topic is not None:
            return topic.index.end
        before = self.deleted.get(name)
        return 0 if before is None else before.end

    def group(self, topic: str, name: str) -> Group | None:
        """Returns the group, or None."""
        found_topic = self.topics.get(topic)
        return None if found_topic is None else found_topic.groups.get(name)

    # -- messages ----------------------------------------------------------------------------------------------------

    def place(self, topic: str, count: int, offset: int, size_bytes: int, *, ready_at_ms: int, sealed_end: int) -> None:
        """Assign the topic's next sequences to messages that are contiguous in the message log."""
        index = self.topic(topic).index
        self.active_segment_topics[topic] = index
        index.place(count, offset, size_bytes, ready_at_ms=ready_at_ms, sealed_end=sealed_end)

    def replay_message(self, stored: StoredMessage) -> None:
        """Apply a message of the message log: its id and, if it is in its topic, its location."""
        record, ready_at_ms = stored.record, stored.stored_at_ms
        self.recent.add(record.topic, record.id)
        if stored.sequence is not None:
            index = self.topic(record.topic).index
            if stored.sequence != index.end:
                index.begin_at(stored.sequence)
                index.skip_to(stored.sequence, ready_at_ms=ready_at_ms)
            self.place(record.topic, 1, stored.offset, stored.size_bytes, ready_at_ms=ready_at_ms, sealed_end=0)
        if stored.is_dispatched:
            self.active_segment_special.append(stored.offset)

    def footer(self, segment: int, end: int) -> Footer:
        """Returns what is in memory of the active segment, which begins and ends at these offsets. Changes nothing."""
        return footer_of(
            segment, end, topics=self.active_segment_topics.values(),
            ids=self.recent.newest(self.recent.added - self.recent_before_written),
            special=self.active_segment_special.tolist(), remade=self.active_segment_footers,
        )  # fmt: skip

    def replace_locations(self, segment: int, footer: FoundFooter) -> None:
        """Replace the in-memory locations of a segment's messages by those of its footer, which is complete."""
        for name, entries in footer.directory.topics.items():
            index = self.topic(name).index
            index.forget_tail()
            for block in entries:
                block_place = BlockPlace(segment, footer.base + block.position, block.runs, block.crc)
                index.add_block(block.first, block.end, block.first_time_ms, block_place)
        self.active_segment_topics.clear()
        self.active_segment_special = array("Q")
        self.active_segment_footers = {}
        self.recent_before_written = self.recent.added

    def update_locations(self, segment: int, footer: FoundFooter) -> None:
        """Update the block locations of a segment whose footer was made anew."""
        for name, entries in footer.directory.topics.items():
            topic = self.topics.get(name)
            if topic is None or topic.index.part_in(segment) is None:
                continue  # it was deleted meanwhile
            topic.index.replace_blocks(
                [
                    (
                        block.first,
                        block.first_time_ms,
                        BlockPlace(segment, footer.base + block.position, block.runs, block.crc),
                    )
                    for block in entries
                ]
            )

    # -- actions -----------------------------------------------------------------------------------------------------

    def replay_action(self, action: journal.Action) -> None:  # noqa: C901 - one arm an action
        """Apply a record of the action log, in order, after all messages were replayed."""
        self.latest_ms = action.at_ms
        match action:
            case journal.Fired() | journal.Canceled():
                pass  # for readers of the log: the schedule has a log of its own
            case journal.Opened():
                self.epoch, self.messages_end = action.number, action.messages_end
            case journal.Declared():
                if action.is_new:  # if one of this name still exists, the record of its deletion is damaged
                    self.delete_group(action.topic, action.group)
                self.declare(action.topic, action.group, config_of(action.settings), position=action.position)
            case DeletedGroup():
                self.delete_group(action.topic, action.group)
            case DeletedTopic():
                tombstone = Tombstone(action.end, action.scheduled_end, action.messages_end, action.actions_end)
                self.delete_topic(action.topic, tombstone)
            case PurgedTopic():
                for name, generation in action.groups:
                    purged_group = self.group(action.topic, name)
                    if purged_group is not None:
                        purged_group.seek(action.end, generation=generation)
            case ClockStepped():
                for topic in self.topics.values():
                    for moved_group in topic.groups.values():
                        moved_group.move_redriven(action.by_ms)
            case AddedRecurring() | PausedRecurring() | DeletedRecurring() | FiredRecurring():
                self.recurring.replay(action)
                if isinstance(action, AddedRecurring):
                    self.topic(action.topic)
            case _:
                group = self.group(action.topic, action.group)
                if group is not None:
                    _replay_on_group(group, action)

    def declare(self, topic: str, name: str, config: GroupConfig, *, position: int) -> Group:
        """Create a group at a position, or change the settings of an existing one."""
        groups = self.topic(topic).groups
        if name in groups:
            groups[name].config = config
        else:
            groups[name] = Group(
                name=name, config=config, position=position, total=self.in_flight_total,
                dead_letter_memory=self.dead_letter_memory, reason_budget=self.reason_budget,
                generation=self.generation,
            )  # fmt: skip
        if config.ordered and groups[name].order is None:
            groups[name].order = KeyOrder()
        self._set_filter(topic, groups[name], config.filter)
        return groups[name]

    # -- deleting ----------------------------------------------------------------------------------------------------

    def delete_group(self, topic: str, name: str) -> None:
        """Delete a group with all of its state; idempotent."""
        known_topic = self.topics.get(topic)
        group = None if known_topic is None else known_topic.groups.pop(name, None)
        if known_topic is None or group is None:
            return
        self.generation = max(self.generation, group.generation + 1)
        group.delete()
        if known_topic.matcher is not None:
            known_topic.matcher.declare(name, None, end=known_topic.index.end)
        self._forget_counters(lambda counted: counted[1:] == (topic, name))

    def delete_topic(self, name: str, tombstone: Tombstone, *, is_kept: bool = False) -> None:
        """Remove the messages that a topic got before it was deleted, and all its groups.

        Later messages belong to another topic of this name; `is_kept` says that there is one even without messages.
        """
        if tombstone.end or tombstone.scheduled_end:
            self.deleted[name] = tombstone
        topic = self.topics.get(name)
        if topic is None:
            return
        if not is_kept:
            for group in list(topic.groups):
                self.delete_group(name, group)
            topic.matcher = None
        if topic.index.is_empty() or topic.index.begins_before(tombstone.messages_end):
            topic.index.drop_below(tombstone.end)
        if not is_kept and topic.index.is_empty():
            del self.topics[name]
            self.active_segment_topics.pop(name, None)
            self.coverage.deleted(name)
            self._forget_counters(lambda counted: counted[1] == name)

    def forget_deleted(self, *, messages_start: int, actions_start: int) -> None:
        """Forget deleted topics of which neither log, whose starts are given, holds anything any more."""
        self.deleted = {
            name: tombstone
            for name, tombstone in self.deleted.items()
            if tombstone.messages_end > messages_start or tombstone.actions_end > actions_start
        }

    def is_void(self, topic: str, seq: int) -> bool:
        """Returns whether a scheduled message, by its arrival number, was published to a topic deleted since."""
        before = self.deleted.get(topic)
        return before is not None and seq < before.scheduled_end

    def _forget_counters(self, is_gone: Callable[[tuple[str, str, str]], bool]) -> None:
        for counter_key in [counter_key for counter_key in self.counters if is_gone(counter_key)]:
            del self.counters[counter_key]

    def _set_filter(self, topic: str, group: Group, text: str | None) -> None:
        known_topic = self.topic(topic)
        if text is None:
            group.accepts = None
            if known_topic.matcher is not None:
                known_topic.matcher.declare(group.name, None, end=known_topic.index.end)
            return
        self.is_filtering = True
        node = parse(text)
        group.accepts = compile_condition(node)
        if known_topic.matcher is None:
            options = self._options
            known_topic.matcher = SubscriptionMatcher(
                options.filter_index_headers.get(topic, options.filter_index_header)
            )
        known_topic.matcher.declare(group.name, text, node, end=known_topic.index.end)


def settings_of(config: GroupConfig) -> dict[str, str | int | float | bool | None]:
    """Returns a group's settings in their serialised form."""
    return {name: getattr(config, name) for name in _SETTINGS}


def config_of(settings: dict[str, str | int | float | bool | None]) -> GroupConfig:
    """Parses a group's serialised settings; settings unknown to this version are ignored."""
    return GroupConfig(**{name: setting for name, setting in settings.items() if name in _SETTINGS})  # type: ignore[arg-type]


def _replay_on_group(group: Group, action: journal.Action) -> None:  # noqa: C901 - one arm an action
    match action:
        case journal.Handed(visible_at_ms=visible_at_ms):
            together = sum(run.count for run in action.runs)
            for run in action.runs:
                group.deliver(
                    run.first, run.count, delivery=run.delivery, attempt=run.attempt,
                    visible_at_ms=visible_at_ms, together=together,
                    expiry_counts=together == 1 and not action.begins,
                )  # fmt: skip
        case journal.Settled():
            for first, count in action.runs:
                group.ack(first, count)
        case journal.Requeued():
            for first, count, visible_at_ms, used in action.entries:
                if group.is_open(first, first + count):
                    requeue = Requeue(first, count, visible_at_ms, used)
                    group.requeue(requeue, reason=action.reason, expired=action.expired)
        case journal.Extended():
            for first, count in action.entries:
                group.extend(first, count, visible_at_ms=action.visible_at_ms, begun=action.begun)
        case journal.Died():
            for first, count, attempts in action.entries:
                cause = DeathCause.EXPIRED if action.expired else DeathCause.REJECTED
                group.die(Death(first, count, attempts, action.reason, cause), at_ms=action.at_ms)
        case journal.Redriven():
            ranges = [(first, first + count) for first, count in action.entries]
            group.redrive_pace = RateLimit(*action.pace)  # which a step that no record has may have moved
            group.redrive(ranges, now_ms=action.at_ms, per_second=action.per_second)
        case RedriveStopped():
            ranges = [(first, first + count) for first, count in action.entries]
            group.stop_redrive(ranges, now_ms=action.at_ms)
        case Discarded():
            group.discard([(first, first + count) for first, count in action.entries])
        case Edited():
            group.edit(action.entries, now_ms=action.at_ms)
        case journal.Sought():
            group.seek(action.position, generation=action.generation, moved_from=action.moved_from)
        case journal.Dropped():
            group.drop_before(action.position, offset=action.offset)
        case journal.MovedAside():
            group.move_aside(action.entries, moved_to=action.moved_to)
        case Filed():
            group.file(action.runs, position=action.position)
        case journal.Paused():
            group.paused = action.paused
        case _:
            raise RuntimeError(f"not an action on a group: {type(action).__name__}")


# -- repeated publishes ------------------------------------------------------------------------------------------------


class RecentIds:
    """The newest `count_max` messages, in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._topics_of_ids: MessageIdMap[str] = MessageIdMap(str)
        self._ids: deque[str] = deque()
        self._topics: deque[str] = deque()  # of each of the ids
        self.added = 0

    def __len__(self) -> int:
        return len(self._ids)

    def has(self, topic: str, message_id: str) -> bool:
        """Returns whether this message is remembered."""
        return self._topics_of_ids.get(topic, message_id) is not None

    def has_any(self, message_ids: Iterable[str]) -> bool:
        """Returns whether any of these ids is remembered, on any topic."""
        return self._topics_of_ids.has_any(message_ids)

    def topics(self, message_id: str) -> Iterable[str]:
        """Returns the topics that have a message of this id."""
        return self._topics_of_ids.of_id(message_id)

    def add(self, topic: str, message_id: str) -> None:
        """Remember a message; the oldest one is dropped at the limit."""
        if not self.has(topic, message_id):
            self._topics_of_ids.put(message_id, topic)
            self._append([message_id], [topic])

    def add_all(self, topics: Iterable[str], message_ids: Sequence[str]) -> None:
        """Remember messages, some of which may be known already."""
        if len(set(message_ids)) == len(message_ids) and not self.has_any(message_ids):
            self.add_new(list(topics), message_ids)
            return
        for topic, message_id in zip(topics, message_ids, strict=True):
            self.add(topic, message_id)

    def add_new(self, topics: Sequence[str], message_ids: Sequence[str]) -> None:
        """Remember messages under distinct ids of which none is known."""
        self._topics_of_ids.put_new(message_ids, topics)
        self._append(message_ids, topics)

    def newest(self, count: int) -> list[tuple[str, list[str]]]:
        """Returns the last `count` messages, in order: each topic with the consecutive ids on it."""
        start = max(0, len(self._ids) - count)
        pairs = zip(islice(self._topics, start, None), islice(self._ids, start, None), strict=True)
        return [
            (topic, [message_id for _, message_id in some]) for topic, some in groupby(pairs, key=lambda pair: pair[0])
        ]

    def _append(self, message_ids: Sequence[str], topics: Sequence[str]) -> None:
        self._ids.extend(message_ids)
        self._topics.extend(topics)
        self.added += len(message_ids)
        while len(self._ids) > self._count_max:
            self._topics_of_ids.pop(self._topics.popleft(), self._ids.popleft())
