"""Turns messages with no attempts left into dead letters, and defers those without room. Under the lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.group.consumer_group import Death, DeathCause, Group
from outbox_core.journal import journal
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

DEATH_PUT_OFF_MS: Final = 60_000
"""Messages that should become dead letters, but find no room, are deferred by this time."""
DEATHS_AT_ONCE_MAX: Final = 100
"""This many become dead letters before the room is checked again: each may have a long history."""


class DeadLetterWriter:
    """Dead letters, within the byte limit `dead_letters_bytes_max`."""

    def __init__(self, context: EngineContext, writer: LogWriter, wakeups: Wakeups) -> None:
        self._options = context.options
        self._state = context.state
        self._writer = writer
        self._wakeups = wakeups

    def bury(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        """Create dead letters; without room for them, the messages are deferred, and delivered to nobody meanwhile.

        Dropping the oldest dead letters would lose what they are for. Files of their own would need an index with its
        own checkpoints and crash windows, for groups in which a million messages failed and nobody looked.
        """
        for start in range(0, len(deaths), DEATHS_AT_ONCE_MAX):
            if self._state.dead_letter_memory.size_bytes >= self._options.dead_letters_bytes_max:
                self._put_off(topic, group, deaths[start:], at_ms=at_ms)
                return
            self._bury_all(topic, group, deaths[start : start + DEATHS_AT_ONCE_MAX], at_ms=at_ms)

    def _bury_all(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        alike: defaultdict[tuple[str, bool], list[tuple[int, int, int]]] = defaultdict(list)
        for death in deaths:
            alike[death.reason, death.cause is DeathCause.EXPIRED].append((death.first, death.count, death.attempts))
        for (reason, expired), entries in alike.items():
            self._writer.act(
                journal.Died(
                    topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason, expired=expired
                )
            )  # fmt: skip
        self._wakeups.wake_next(topic, group)
        for death in deaths:
            self._state.counters[f"dead_lettered_{death.cause}", topic, group.name] += death.count

    def _put_off(self, topic: str, group: Group, deaths: Sequence[Death], *, at_ms: int) -> None:
        alike: defaultdict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        for death in deaths:
            alike[death.reason].append((death.first, death.count, at_ms + DEATH_PUT_OFF_MS, death.attempts))
        for reason, entries in alike.items():
            self._writer.act(
                journal.Requeued(topic=topic, group=group.name, at_ms=at_ms, entries=entries, reason=reason)
            )
        logger.warning(
            "dead_letters_full",
            extra={"topic": topic, "group": group.name, "messages": sum(death.count for death in deaths),
                   "cure": "redrive dead letters, or raise dead_letters_bytes_max"},
        )  # fmt: skip
        self._wakeups.wake_short()  # no consumer holds them any more
