"""Watches for groups that have waiting messages and get none: why, since when, and how many wait.

The decision is decide_stall(), for the route, the metric and the events alike. Each look at a group takes the lock for
a few dictionary look-ups, and none visits its messages.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.group.consumer_group import Group
from outbox_broker.group.stall import StallFacts, StallReason, decide_stall
from outbox_broker.state.engine_state import Topic
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

LOOKS_PER_STEP: Final = 500
"""How many topics and groups a step of check() looks at: the others have their turn with the next steps."""
EVENTS_PER_STEP: Final = 20
"""How many stalls a step tells: those beyond are told by the next steps, if they last."""
_WANTED_BY_OPERATORS: Final = frozenset({StallReason.PAUSED, StallReason.RETRY_LATER})


@dataclass(frozen=True, slots=True)
class Stall:
    """Why nothing is delivered to a group. `since_ms`: when it was first seen after the group's last delivery: by a
    check every `stall_check_ms`, and never before the broker's start.
    """

    reason: StallReason
    since_ms: int
    lasts_ms: int
    """The same by a clock that does not step."""
    waiting: int
    in_flight: int
    next_visible_ms: int | None
    """When the first unsettled message becomes visible: in flight now, or waiting for another attempt. None: no message
    is unsettled.
    """


@dataclass(slots=True)
class _Seen:
    """A stall as it was seen by earlier looks."""

    reason: StallReason
    deliveries: int
    since_ms: int
    since_monotonic_ms: int
    is_told: bool = False


class StallWatch:
    """Looks at groups. An unknown topic or group is a KeyError."""

    def __init__(self, context: EngineContext, wakeups: Wakeups, groups: GroupRegistry) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._wakeups = wakeups
        self._groups = groups
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._ended: list[tuple[tuple[str, str], StallReason, int]] = []
        """Ends of stalls that were logged: group, reason, duration. As many as were logged since the last step."""
        self._topics_to_check: deque[str] = deque()
        self._groups_to_check: deque[tuple[str, str]] = deque()
        self._checked_at_ms = context.clock.monotonic_ms()

    def stall_of(self, topic: str, group: str) -> Stall | None:
        """Returns why nothing is delivered to a group; None if nothing waits, or it is delivered."""
        with self._lock:
            return self._look(self._groups.known_topic(topic), self._groups.known_group(topic, group))

    def check(self) -> None:
        """Look at some groups, at all of them every `stall_check_ms` if they are not too many; log what stalls for
        `stall_event_ms`, and what is delivered again.
        """
        now_ms = self._clock.monotonic_ms()
        if not (self._topics_to_check or self._groups_to_check):
            if now_ms - self._checked_at_ms < self._options.stall_check_ms:
                return
            self._checked_at_ms = now_ms
            with self._lock:  # names alone: 40,000 topics with their groups would hold up everybody
                self._topics_to_check.extend(self._state.topics)
                self._groups_to_check.extend(self._seen)  # among which are those that were deleted since
        events_left = EVENTS_PER_STEP
        for _ in range(LOOKS_PER_STEP):
            if self._groups_to_check:
                events_left -= self._check_one(*self._groups_to_check.popleft(), may_tell=events_left > 0)
            elif self._topics_to_check:
                self._queue_groups(self._topics_to_check.popleft())
            else:
                break
        self._tell_ended()

    def _queue_groups(self, topic: str) -> None:
        with self._lock:
            known_topic = self._state.topics.get(topic)
            if known_topic is not None:
                self._groups_to_check.extend((topic, group) for group in known_topic.groups)

    def _check_one(self, topic: str, group: str, *, may_tell: bool) -> bool:
        """Look at one group; returns whether an event was logged."""
        with self._lock:
            known_topic = self._state.topics.get(topic)
            known_group = self._state.group(topic, group)
            if known_topic is None or known_group is None:
                self._seen.pop((topic, group), None)
                return False
            stall = self._look(known_topic, known_group)
            if stall is None or not may_tell:
                return False
            seen = self._seen[topic, group]
            if seen.is_told or stall.lasts_ms < self._options.stall_event_ms:
                return False
            seen.is_told = True
        logger.log(
            logging.INFO if stall.reason in _WANTED_BY_OPERATORS else logging.WARNING,
            "group_stalled",
            extra={
                "topic": topic, "group": group, "reason": stall.reason, "since_ms": stall.since_ms,
                "waiting": stall.waiting, "in_flight": stall.in_flight,
            },
        )  # fmt: skip
        return True

    def _tell_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for (topic, group), reason, stalled_ms in ended:
            logger.info(
                "group_stall_ended",
                extra={"topic": topic, "group": group, "reason": reason, "stalled_ms": stalled_ms},
            )

    def _look(self, topic: Topic, group: Group) -> Stall | None:
        """Returns the stall of a group, and notes since when it has lasted. Under the lock."""
        group_key = (topic.index.name, group.name)
        self._groups.skip_filtered(topic, group)
        now_ms = self._clock.now_ms()
        facts = self._facts(topic, group, now_ms=now_ms)
        reason = decide_stall(facts, now_ms=now_ms)
        seen = self._seen.get(group_key)
        if seen is not None and (seen.reason is not reason or seen.deliveries != group.deliveries):
            if seen.is_told:  # whoever looks may find the end first; check() tells it
                lasted_ms = self._clock.monotonic_ms() - seen.since_monotonic_ms
                self._ended.append((group_key, seen.reason, lasted_ms))
            del self._seen[group_key]
            seen = None
        if reason is None:
            return None
        if seen is None:
            seen = _Seen(reason, group.deliveries, now_ms, self._clock.monotonic_ms())
            self._seen[group_key] = seen
        lasts_ms = self._clock.monotonic_ms() - seen.since_monotonic_ms
        return Stall(reason, seen.since_ms, lasts_ms, facts.waiting, facts.in_flight, facts.next_visible_ms)

    def _facts(self, topic: Topic, group: Group, *, now_ms: int) -> StallFacts:
        options, index = self._options, topic.index
        fresh_end = index.visible_end(group.position, count_max=1, durable_end=self._context.messages.committed)
        order, in_flight = group.order, group.unsettled.in_flight
        return StallFacts(
            waiting=index.end - min(group.position, index.end) + group.waiting(),
            in_flight=in_flight,
            next_visible_ms=group.next_visible_ms(),
            has_fresh=fresh_end > group.position,
            filed=0 if order is None else len(order),
            has_filed_ready=order is not None and bool(order.ready(1)),
            room=options.group_in_hand_max - group.unsettled.delivered,
            room_of_all=max(
                options.in_hand_max - self._state.in_flight_total.count, options.group_in_hand_min - in_flight
            ),
            paused=group.paused,
            is_asked_for=(
                (index.name, group.name) in self._wakeups.waiters
                or now_ms - group.pulled_at_ms < options.consumer_idle_ms
            ),
        )  # fmt: skip
