"""Operators' view of groups: declare, seek, pause and inspect them; list dead letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_reader import DeadLetterReader
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.redrive_clock import RedriveClock
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.filter import parse
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal import journal
from outbox_core.messages.broker_port import topic_figures
from outbox_core.messages.message import DeadLetter, GroupConfig, Record, check_group, check_topic

_READS_MAX: Final = 100


class GroupAdmin:
    """Group administration. An unknown topic or group is a KeyError."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        dead_letters: DeadLetterReader, footer_repair: FooterRepair, redrive_clock: RedriveClock,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._dead_letters = dead_letters
        self._footer_repair = footer_repair
        self._redrive_clock = redrive_clock

    def declare_group(
        self, topic: str, group: str, config: GroupConfig, *, quota: ClientTopicQuota | None = None
    ) -> None:
        """Create a group, or change its settings; an existing group keeps its position.

        `quota`: how many topics its client may have. Raises FilterError if its filter does not parse.
        """
        check_topic(topic)
        check_group(group)
        if config.filter is not None:
            parse(config.filter)  # refused before anything is written
        if config.start != "earliest":
            self._context.messages.commit()
        end = self._footer_repair.looked_up(lambda: self._declared(topic, group, config, quota))
        self._context.actions.commit(end)
        self._wakeups.wake(topic, group)

    def topics(self) -> list[str]:
        """Returns all topics, sorted."""
        with self._lock:
            return sorted(self._state.topics)

    def groups(self, topic: str) -> list[str]:
        """Returns all groups of a topic, sorted."""
        with self._lock:
            return sorted(self._groups.known_topic(topic).groups)

    def group_config(self, topic: str, group: str) -> GroupConfig:
        """Returns a group's settings."""
        with self._lock:
            return self._groups.known_group(topic, group).config

    def group_progress(self, topic: str, group: str) -> tuple[bool, int]:
        """Returns whether a group is paused, and the first offset that it may still get, dead letters apart."""
        with self._lock:
            known_topic, known_group = self._groups.known_topic(topic), self._groups.known_group(topic, group)
            self._groups.skip_filtered(known_topic, known_group)
            return known_group.paused, known_group.oldest_unsettled()

    def topic_figures(self, topic: str) -> Mapping[str, int]:
        """Returns stored (messages appended to the topic) and scheduled; and of its groups together backlog, in_flight,
        dead, and the longest oldest_unacked_age_ms. Locks once per group, to keep each lock short.
        """

        def read() -> Mapping[str, int]:
            look_up = self._footer_repair.looked_up
            groups = [look_up(partial(self._figures, topic, group)) for group in self.groups(topic)]
            with self._lock:
                return topic_figures(stored=self._groups.known_topic(topic).index.end, scheduled=0, groups=groups)

        return self._with_scheduled(topic, read)

    def group_figures(self, topic: str, group: str) -> Mapping[str, int]:
        """Returns stored, backlog (not delivered, or waiting for redelivery), in_flight, scheduled, dead, position,
        redriving (of the backlog: redriven, and not ready yet), redrive_left_ms (until all of them are),
        oldest_unacked_age_ms.
        """
        return self._with_scheduled(topic, lambda: self._footer_repair.looked_up(lambda: self._figures(topic, group)))

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group to a time or to an offset (a sequence of the topic); earlier receipts become stale.

        Messages dropped by retention are skipped, but for those that the group has not settled, which were moved.
        Raises InvalidMessage for an offset beyond the topic's end.
        """
        if (to_ms is None) == (to_offset is None) or (to_offset is not None and to_offset < 0):
            raise InvalidMessage("seek to a time (to_ms) or to an offset (to_offset >= 0), one of them")
        self._context.messages.commit()
        offset = to_offset or 0
        if to_ms is not None:
            offset = self._footer_repair.looked_up(lambda: self._groups.known_topic(topic).index.sequence_at(to_ms))
        with self._lock:
            self._context.refuse_if_closed()
            index, known_group = self._groups.known_topic(topic).index, self._groups.known_group(topic, group)
            if offset > index.end:
                raise InvalidMessage(
                    f"offset {offset:,} is beyond the end of {topic}; {index.end:,} is where the next message comes"
                )
            position = min(max(offset, index.start), self._groups.durable_end(self._groups.known_topic(topic)))
            self._writer.act(
                journal.Sought(
                    topic=topic,
                    group=group,
                    at_ms=self._clock.now_ms(),
                    position=position,
                    generation=known_group.generation + 1,
                    moved_from=offset if to_ms is None else known_group.aside.first_ready_since(to_ms),
                )
            )
            end = self._context.actions.end
            self._wakeups.wake_next(topic, known_group)
        self._context.actions.commit(end)
        self._wakeups.wake(topic, group)

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Stop or resume deliveries to a group; in-flight messages may still be settled."""
        with self._lock:
            self._context.refuse_if_closed()
            self._groups.known_group(topic, group)
            self._writer.act(journal.Paused(topic=topic, group=group, at_ms=self._clock.now_ms(), paused=paused))
            end = self._context.actions.end
        self._context.actions.commit(end)
        self._wakeups.wake(topic, group)

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None, bytes_max: int | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """Returns a page of dead letters by sequence, and the next one's cursor. One letter may exceed `bytes_max`."""
        if after is not None and not (after.isascii() and after.isdigit()):
            raise InvalidMessage("after must be the `next` of an earlier page")
        with self._lock:
            self._context.refuse_if_closed()
            known_topic, known_group = self._groups.known_topic(topic), self._groups.known_group(topic, group)
            self._dead_letters.bury_expired(topic, known_group)
        page = self._dead_letters.page(
            known_topic, known_group, start=0 if after is None else int(after) + 1, count_max=limit,
            bytes_max=min(bytes_max or self._options.pull_bytes_max, self._options.pull_bytes_max),
        )  # fmt: skip
        letters = [
            DeadLetter(
                message=record or Record(id="", topic=topic, body=b""), group=group,
                attempts=dead.attempts, reason=dead.reason, dead_at_ms=dead.dead_at_ms, history=dead.history,
            )
            for _, dead, record in page.found
        ]  # fmt: skip
        return letters, None if page.following is None else str(page.following - 1)

    def _declared(self, topic: str, group: str, config: GroupConfig, quota: ClientTopicQuota | None) -> int:
        """Declare a group; returns the end of the action log, to be committed."""
        self._context.refuse_if_closed()
        self._groups.declare(topic, group, config, quota)
        return self._context.actions.end

    def _with_scheduled(self, topic: str, read: Callable[[], Mapping[str, int]]) -> Mapping[str, int]:
        """Returns these figures with how many messages are scheduled: claimed ones until they are placed in the topic.

        The schedule is not asked under the lock, since it may wait for its disk. So the figures are read again if a
        batch was placed meanwhile: its messages would be in both, or in none.
        """
        for _ in range(_READS_MAX):
            placed_to, before = self._context.placed_to, self._state.dispatched_before
            scheduled = self._context.schedule.count_undelivered(topic, after=placed_to)
            scheduled -= sum(name == topic for name, _ in list(before))  # placed before a restart, and not known to be
            figures = {**read(), "scheduled": scheduled}
            if placed_to == self._context.placed_to:
                break
        return figures

    def _figures(self, topic: str, group: str) -> dict[str, int]:
        known_topic, known_group = self._groups.known_topic(topic), self._groups.known_group(topic, group)
        left = self._groups.remainder(known_topic, known_group)
        paced_ms = self._redrive_clock.paced_ms()
        redriving = sum(end - first for first, end in known_group.redriving(now_ms=paced_ms))
        return {
            "stored": known_topic.index.end,
            "backlog": left.ready,
            "in_flight": left.in_flight,
            "dead": left.dead,
            "redriving": redriving,
            "redrive_left_ms": known_group.redrive_pace.second_ms - paced_ms if redriving else 0,
            "position": known_group.position,
            "oldest_unacked_age_ms": left.oldest_unacked_age_ms,
        }
