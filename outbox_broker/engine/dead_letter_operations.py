"""What operators do with dead letters, in hand: count those that are meant, and discard them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import takewhile

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_reader import RUNS_AT_ONCE, ChosenRun, DeadLetterReader
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.group.consumer_group import Group
from outbox_core.journal.dead_letter_records import Discarded
from outbox_core.messages.message import DeadCount, DeadFilter, check_why
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class DeadLetterOperations:
    """Dead letters by `ids`, or those that fit `where`; without both, all of a group. Nothing is chosen by age alone.

    An unknown topic or group is a KeyError, an id that is not dead (any more) is passed over. `by`: the name of the
    token that asks; `why`: its operator's reason. Both are in the action log, for those who look for a message later.
    """

    def __init__(
        self, context: EngineContext, writer: LogWriter, groups: GroupRegistry, reader: DeadLetterReader
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._writer = writer
        self._groups = groups
        self._reader = reader

    def count(
        self, topic: str, group: str, *, ids: Collection[str] | None = None, where: DeadFilter | None = None
    ) -> DeadCount:
        """Returns how many are meant, and until when they died."""
        before_ms = self._clock.now_ms() + 1  # what dies in this very millisecond is counted
        _, chosen = self._chosen(topic, group, ids=ids, where=where, dead_before_ms=before_ms)
        return DeadCount(count=sum(end - first for first, end, _ in chosen), dead_before_ms=before_ms)

    def discard(
        self, topic: str, group: str, *, ids: Collection[str] | None = None, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, by: str, why: str,
    ) -> int:  # fmt: skip
        """Discard dead letters: the group never gets them again, and they hold no segment back any more.

        `dead_before_ms`: only those that died before, as count() says. Returns how many, once it is durable.
        """
        check_why(why)
        chosen_group, chosen = self._chosen(topic, group, ids=ids, where=where, dead_before_ms=dead_before_ms)
        count, runs_at_once = 0, min(RUNS_AT_ONCE, self._options.redrive_batch_max)
        for start in range(0, len(chosen), runs_at_once):
            with self._lock:
                self._context.refuse_if_closed()
                if self._groups.known_group(topic, group) is not chosen_group:
                    break  # it was deleted meanwhile, and its dead letters with it
                # Some may have been redriven during the search, and died again since, of something else.
                entries = [
                    entry for run in chosen[start : start + runs_at_once] for entry in _still_dead(chosen_group, run)
                ]
                if entries:
                    self._writer.act(
                        Discarded(topic=topic, group=group, at_ms=self._clock.now_ms(), entries=entries, by=by, why=why)
                    )
                    discarded = sum(messages for _, messages in entries)
                    self._state.counters["discarded", topic, group] += discarded
                    count += discarded
        self._context.actions.commit()
        logger.info(
            "dead_letters_discarded",
            extra={"topic": topic, "group": group, "messages": count, "by": by, "why": why},
        )
        return count

    def _chosen(
        self, topic: str, group: str, *, ids: Collection[str] | None, where: DeadFilter | None,
        dead_before_ms: int | None,
    ) -> tuple[Group, list[ChosenRun]]:  # fmt: skip
        if where is not None:
            where.check()
        with self._lock:
            self._context.refuse_if_closed()
            known_topic, known_group = self._groups.known_topic(topic), self._groups.known_group(topic, group)
            self._reader.bury_expired(topic, known_group)
        chosen = self._reader.chosen(known_topic, known_group, ids=ids, where=where, dead_before_ms=dead_before_ms)
        return known_group, chosen


def _still_dead(group: Group, chosen: ChosenRun) -> Iterator[tuple[int, int]]:
    """Yields what is dead of a chosen run since the same death, as (first, count)."""
    first, end, dead_at_ms = chosen
    for run in takewhile(lambda run: run.first < end, group.dead.runs(first)):
        if run.dead_at_ms == dead_at_ms:
            yield run.first, min(run.end, end) - run.first
