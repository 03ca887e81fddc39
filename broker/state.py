"""What the engine keeps in memory: topics, groups, schedule, recent ids; all of it rebuilt from the logs.

Not the logs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from broker.consume.group import Death, Group, Requeue
from broker.consume.topic import TopicIndex
from broker.dedup import RecentIds
from broker.delay.schedule import MemorySchedule, Schedule, Scheduled
from broker.filter import compile_condition, parse
from broker.options import EngineOptions
from messaging import journal
from messaging.message import GroupConfig

_SETTINGS = tuple(one.name for one in fields(GroupConfig))


@dataclass(slots=True)
class Topic:
    """A topic's index and its groups."""

    index: TopicIndex
    groups: dict[str, Group] = field(default_factory=dict)


class BrokerState:
    """Everything that is in memory. Changed under the engine's lock, and by replay() before the engine opens."""

    def __init__(self, options: EngineOptions) -> None:
        self.topics: dict[str, Topic] = {}
        self.schedule: Schedule = MemorySchedule()
        self.recent = RecentIds(options.dedup_messages_max)
        self.canceled = RecentIds(options.cancel_tombstones_max)
        self.stopped = RecentIds(options.cancel_tombstones_max)  # of those canceled: whose messages came
        self.counters: Counter[tuple[str, str, str]] = Counter()

    def topic(self, name: str) -> Topic:
        """The topic, made where it is new."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(TopicIndex(name))
        return found

    def group(self, topic: str, name: str) -> Group | None:
        """The group, or None where there is none."""
        found = self.topics.get(topic)
        return None if found is None else found.groups.get(name)

    def replay_message(self, record: journal.MessageRecord, offset: int) -> None:
        """A message as the message log tells it."""
        topic = self.topic(record.topic)
        self.recent.add(record.id)
        if record.sequence is None:
            due_ms = record.deliver_at_ms or 0
            self.schedule.add(Scheduled(record.id, record.topic, due_ms, offset))
        else:
            topic.index.place(record.sequence, offset, ready_at_ms=record.stored_at_ms)

    def replay_action(self, action: journal.Action) -> None:
        """An action as the action log tells it, in order, all messages having been replayed."""
        match action:
            case journal.Fired():
                self._replay_fired(action)
            case journal.Canceled():
                for message_id in action.ids:
                    self.canceled.add(message_id)
                    self.stop(message_id)
            case journal.Declared():
                self.declare(action.topic, action.group, config_of(action.settings), position=action.position)
            case _:
                group = self.group(action.topic, action.group)
                if group is not None:
                    _replay_on_group(group, action)

    def stop(self, message_id: str) -> None:
        """Take a canceled message out of the schedule, if it has come."""
        if self.schedule.remove(message_id) is not None:
            self.stopped.add(message_id)

    def declare(self, topic: str, name: str, config: GroupConfig, *, position: int) -> Group:
        """Make a group at a position, or change the settings of one that is there."""
        groups = self.topic(topic).groups
        if name in groups:
            groups[name].config = config
        else:
            groups[name] = Group(name=name, config=config, position=position)
        groups[name].accepts = None if config.filter is None else compile_condition(parse(config.filter))
        return groups[name]

    def _replay_fired(self, action: journal.Fired) -> None:
        index = self.topic(action.topic).index
        for sequence, message_id in action.entries:
            message = self.schedule.remove(message_id)
            if message is not None:
                index.place(sequence, message.offset, ready_at_ms=action.at_ms)


def settings_of(config: GroupConfig) -> dict[str, str | int | float | bool | None]:
    """A group's settings as they are written down."""
    return {name: getattr(config, name) for name in _SETTINGS}


def config_of(settings: dict[str, str | int | float | bool | None]) -> GroupConfig:
    """A group's settings as they were written down; what this version does not know is left out."""
    return GroupConfig(**{name: value for name, value in settings.items() if name in _SETTINGS})  # type: ignore[arg-type]


def _replay_on_group(group: Group, action: journal.Action) -> None:  # noqa: C901 - one arm an action, no logic
    match action:
        case journal.Delivered(visible_at_ms=visible_at_ms):
            for sequence, message_id, delivery, attempt in action.entries:
                group.replay_hand_out(
                    sequence, message_id, delivery=delivery, attempt=attempt, visible_at_ms=visible_at_ms
                )
        case journal.Acked():
            for sequence, _ in action.entries:
                group.ack(sequence)
        case journal.Requeued():
            for sequence, message_id, visible_at_ms, used in action.entries:
                if sequence in group.unsettled or sequence >= group.position:
                    group.requeue(Requeue(sequence, message_id, visible_at_ms, used), reason=action.reason)
        case journal.Extended():
            for sequence, _ in action.entries:
                if sequence in group.unsettled:
                    group.extend(sequence, visible_at_ms=action.visible_at_ms)
        case journal.Died():
            for sequence, message_id, attempts in action.entries:
                group.die(Death(sequence, message_id, attempts, action.reason), at_ms=action.at_ms)
        case journal.Redriven():
            group.redrive([sequence for sequence, _ in action.entries], now_ms=action.at_ms)
        case journal.Sought():
            group.seek(action.position, life=action.life)
        case journal.Paused():
            group.paused = action.paused
        case _:
            raise RuntimeError(f"not an action on a group: {type(action).__name__}")
