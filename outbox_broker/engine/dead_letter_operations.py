"""What operators do with dead letters, in hand: count, discard, edit and redrive those that are meant; stop
redrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_reader import RUNS_AT_ONCE, ChosenRun, DeadLetterReader, DeadPage
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.puller import DAMAGED, check_within
from outbox_broker.engine.redrive_clock import RedriveClock
from outbox_broker.engine.wakeups import Wakeups
from outbox_broker.group.consumer_group import Group
from outbox_broker.group.dead_letters import DeadRun
from outbox_broker.journal.stored_record import frames_aside
from outbox_broker.state.engine_state import Topic
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal import journal
from outbox_core.journal.dead_letter_records import Discarded, Edited, RedriveStopped
from outbox_core.messages import limits
from outbox_core.messages.ids import edited_id
from outbox_core.messages.message import (
    DeadCount,
    DeadEdit,
    DeadFilter,
    EditPage,
    EditResult,
    EditStatus,
    Message,
    Record,
    check_message_id,
    check_why,
)
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

REDRIVE_PER_SECOND_MAX: Final = 1_000_000
Entry = tuple[int, int]
"""Messages of a topic: the first sequence, and how many."""
OPERATION_USED: Final = "this operation has edited a message of this id before; it is dead again: use another operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOperation:
    """Who edits dead letters, why, and the name that tells a repeat of a request from another one."""

    name: str
    by: str
    why: str
    """Which, with the name of the token that asks, is in the action log."""

    def __post_init__(self) -> None:
        check_message_id(self.name)
        check_why(self.why)


@dataclass(frozen=True, slots=True)
class _EditedLetter:
    """A dead letter, how it died, and what it becomes."""

    sequence: int
    died: DeadRun
    former_id: str
    message: Message


class DeadLetterOperations:
    """Dead letters by `ids`, or those that fit `where`; without both, all of a group. Nothing is chosen by age alone.

    An unknown topic or group is a KeyError, an id that is not dead (any more) is passed over. `by`: the name of the
    token that asks; `why`: its operator's reason. Both are in the action log, for those who look for a message later.
    """

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        reader: DeadLetterReader, redrive_clock: RedriveClock,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._reserve = context.reserve
        self._writer = writer
        self._wakeups = wakeups
        self._groups = groups
        self._reader = reader
        self._redrive_clock = redrive_clock

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

        def act(entries: list[Entry]) -> bool:
            self._writer.act(
                Discarded(topic=topic, group=group, at_ms=self._clock.now_ms(), entries=entries, by=by, why=why)
            )
            self._state.counters["discarded", topic, group] += sum(messages for _, messages in entries)
            return True

        count = self._act_on(chosen_group, chosen, act=act)
        logger.info(
            "dead_letters_discarded",
            extra={"topic": topic, "group": group, "messages": count, "by": by, "why": why},
        )
        return count

    def edit(
        self, topic: str, group: str, edits: Mapping[str, DeadEdit], *, operation: EditOperation
    ) -> list[EditResult]:
        """Edit the dead letters of these ids, and have the group get what they become, at once; other groups get none
        of it. Returns what became of each, once it is durable; a repeat of the same operation returns the same.

        What is edited has another id, and the former one in the header EDITED_HEADER; topic and key stay. What is dead
        twice under one id is edited twice, to the same id.
        """
        known_topic, known_group, done = self._known_for_edit(topic, group)
        results: dict[str, EditResult] = {}
        after: int | None = 0
        while after is not None:
            page = self._page(known_topic, known_group, after=after)
            wanted = [
                (sequence, died, record, edits[record.id])
                for sequence, died, record in page.found
                if record is not None and record.id in edits
            ]
            for result in self._edit_found(topic, known_group, wanted, operation=operation, done=done):
                results[result.id] = result
            after = page.following
        self._context.actions.commit()
        for message_id in edits:
            if message_id not in results:
                results[message_id] = self._not_dead(topic, known_group, message_id, operation=operation)
        self._tell_edited(topic, group, list(results.values()), operation=operation)
        return [results[message_id] for message_id in edits]

    def edit_page(
        self, topic: str, group: str, edit: DeadEdit, *, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, after: int = 0, operation: EditOperation,
    ) -> EditPage:  # fmt: skip
        """Edit, in the same way, those that fit `where` (None: all) among the next dead letters from the sequence
        `after` on. Returns what became of each, once it is durable, and where the next page begins. Damaged ones are
        passed over.

        `dead_before_ms`: only those that died before, as count() says. Raises InvalidMessage for a body: of many
        messages each has its own.
        """
        if edit.body is not None:
            raise InvalidMessage("a body is for a dead letter named by its id; of many, set or remove headers")
        if where is not None:
            where.check()
        known_topic, known_group, done = self._known_for_edit(topic, group)
        page = self._page(known_topic, known_group, after=after)
        before_ms = limits.TIME_MS_MAX if dead_before_ms is None else dead_before_ms
        wanted = [
            (sequence, died, record, edit)
            for sequence, died, record in page.found
            if record is not None and died.dead_at_ms < before_ms and (where is None or _fits(where, died, record))
        ]
        results = self._edit_found(topic, known_group, wanted, operation=operation, done=done)
        self._context.actions.commit()
        self._tell_edited(topic, group, results, operation=operation)
        return EditPage(results=results, next=page.following)

    def redrive(
        self, topic: str, group: str, *, ids: Collection[str] | None = None, per_second: int | None = None
    ) -> int:
        """Redrive dead letters, except those whose records are damaged; returns how many, once it is durable.

        `per_second` of them are ready at once, as many a second later, and so on (None: `redrive_per_second`).
        """
        check_within("per_second", 1 if per_second is None else per_second, 1, REDRIVE_PER_SECOND_MAX)
        rate = per_second or self._options.redrive_per_second
        with self._lock:
            self._context.refuse_if_closed()
            stops = self._groups.known_group(topic, group).redrive_stops
        chosen_group, chosen = self._chosen(topic, group, ids=ids, where=None, dead_before_ms=None)

        def act(entries: list[Entry]) -> bool:
            if chosen_group.redrive_stops != stops:
                return False  # else a stop that comes between two parts would stop only the first
            now_ms, pace = self._redrive_clock.now_ms(), chosen_group.redrive_pace
            self._writer.act(
                journal.Redriven(
                    topic=topic, group=group, at_ms=now_ms, entries=entries, per_second=rate,
                    pace=(pace.second_ms, pace.used),
                )
            )  # fmt: skip
            return True

        count = self._act_on(chosen_group, chosen, act=act, spared_reason=DAMAGED)
        self._wakeups.wake(topic, group)
        return count

    def stop_redrive(self, topic: str, group: str, *, by: str) -> int:
        """Stop all redrives of a group: what still waits for its rate is dead again, as it was, by one action. What is
        ready, or was delivered, stays so. Returns how many are dead again, once it is durable. Idempotent.

        A delivery is decided under the lock as well, of messages that are visible: these are not stopped. All are
        stopped in one hold of it, though they may be many: a part of them would go on at the rate of the others.
        """
        with self._lock:
            self._context.refuse_if_closed()
            stopped_group = self._groups.known_group(topic, group)
            stopped_group.redrive_stops += 1
            now_ms = self._redrive_clock.now_ms()
            entries = [(first, end - first) for first, end in stopped_group.redriving(now_ms=now_ms)]
            if entries:
                self._writer.act(RedriveStopped(topic=topic, group=group, at_ms=now_ms, entries=entries, by=by))
            actions_end = self._context.actions.end
        self._context.actions.commit(actions_end)
        count = sum(messages for _, messages in entries)
        logger.info("redrive_stopped", extra={"topic": topic, "group": group, "messages": count, "by": by})
        return count

    # -- editing -----------------------------------------------------------------------------------------------------

    def _edit_found(
        self, topic: str, group: Group, wanted: Sequence[tuple[int, DeadRun, Record, DeadEdit]], *,
        operation: EditOperation, done: Container[str],
    ) -> list[EditResult]:  # fmt: skip
        """Edit what was read of the dead letters; `done`: ids of edited messages of before. The caller commits.

        The edited messages are durable in the message log before the action that names them is written: a death in
        between leaves frames that nobody reads, and the dead letters as they were. So the action alone decides.
        """
        now_ms = self._clock.now_ms()
        letters: list[_EditedLetter] = []
        results: list[EditResult] = []
        for sequence, died, record, edit in wanted:
            new_id = edited_id(operation.name, topic, group.name, record.id)
            if new_id in done:  # the group's inbox would drop it, and it would be acknowledged unhandled
                results.append(EditResult(id=record.id, status=EditStatus.REFUSED, error=OPERATION_USED))
                continue
            try:
                message = edit.applied(record, message_id=new_id, now_ms=now_ms)
            except InvalidMessage as error:
                results.append(EditResult(id=record.id, status=EditStatus.REFUSED, error=str(error)))
            else:
                letters.append(_EditedLetter(sequence, died, record.id, message))
        if not letters:
            return results
        frames = frames_aside((letter.sequence, letter.message) for letter in letters)
        with self._lock:
            self._context.refuse_if_closed()
            self._reserve.require()
            offsets = self._writer.append_messages(frames, at_ms=now_ms)
            messages_end = self._context.messages.end
        self._context.messages.commit(messages_end)
        placed = list(zip(letters, offsets, frames.sizes, strict=True))
        acted = self._replace_dead(topic, group, placed, operation=operation)
        return results + [
            EditResult(id=letter.former_id, status=EditStatus.EDITED, new_id=letter.message.id)
            if letter.sequence in acted
            else self._not_dead(topic, group, letter.former_id, operation=operation)
            for letter in letters
        ]

    def _replace_dead(
        self, topic: str, group: Group, placed: Sequence[tuple[_EditedLetter, int, int]], *, operation: EditOperation
    ) -> set[int]:
        """Write the action for those that are dead since the same death; returns their sequences."""
        with self._lock:
            self._context.refuse_if_closed()
            # Others may have redriven, discarded or edited it meanwhile; of a group that was deleted nothing is dead.
            entries = [
                (letter.sequence, offset, size_bytes, letter.message.id)
                for letter, offset, size_bytes in placed
                for run in group.dead.among(letter.sequence, letter.sequence + 1)
                # Nothing points to its frame yet: a clock that leapt meanwhile may have had retention drop it.
                if run.dead_at_ms == letter.died.dead_at_ms and offset >= self._context.messages.start
            ]
            if entries:
                now_ms = self._redrive_clock.now_ms()
                self._writer.act(
                    Edited(
                        topic=topic, group=group.name, at_ms=now_ms, entries=entries, by=operation.by,
                        why=operation.why,
                    )
                )  # fmt: skip
                self._state.counters["edited", topic, group.name] += len(entries)
            return {sequence for sequence, _, _, _ in entries}

    def _not_dead(self, topic: str, group: Group, message_id: str, *, operation: EditOperation) -> EditResult:
        """Returns what became of an edit of what is not dead: an earlier request of the operation may have done it."""
        new_id = edited_id(operation.name, topic, group.name, message_id)
        with self._lock:
            is_done = new_id in group.edited_ids
        if is_done:
            return EditResult(id=message_id, status=EditStatus.EDITED, new_id=new_id)
        return EditResult(id=message_id, status=EditStatus.NOT_DEAD)

    def _tell_edited(
        self, topic: str, group: str, results: Sequence[EditResult], *, operation: EditOperation
    ) -> None:  # fmt: skip
        count = sum(result.status is EditStatus.EDITED for result in results)
        logger.info(
            "dead_letters_edited",
            extra={"topic": topic, "group": group, "messages": count, "by": operation.by, "why": operation.why},
        )
        if count:
            self._wakeups.wake(topic, group)

    def _act_on(
        self, group: Group, chosen: Sequence[ChosenRun], *, act: Callable[[list[Entry]], bool],
        spared_reason: str | None = None,
    ) -> int:  # fmt: skip
        """Act on those chosen that are dead since the same death, durably, a thousand runs in one hold of the lock: a
        million would keep every publish and pull waiting. Those that died of `spared_reason` are left. Ends where `act`
        says that it did nothing. Returns on how many it did.
        """
        count, runs_at_once = 0, min(RUNS_AT_ONCE, self._options.redrive_batch_max)
        for start in range(0, len(chosen), runs_at_once):
            with self._lock:
                self._context.refuse_if_closed()
                if group.is_deleted:
                    break  # and its dead letters with it
                # Some may have been redriven during the search, and died again since, of something else.
                entries = [
                    (run.first, run.end - run.first)
                    for first, end, dead_at_ms in chosen[start : start + runs_at_once]
                    for run in group.dead.among(first, end)
                    if run.dead_at_ms == dead_at_ms and run.reason != spared_reason
                ]
                if entries:
                    if not act(entries):
                        break
                    count += sum(messages for _, messages in entries)
        self._context.actions.commit()
        return count

    def _chosen(
        self, topic: str, group: str, *, ids: Collection[str] | None, where: DeadFilter | None,
        dead_before_ms: int | None,
    ) -> tuple[Group, list[ChosenRun]]:  # fmt: skip
        if where is not None:
            where.check()
        known_topic, known_group = self._known(topic, group)
        chosen = self._reader.chosen(known_topic, known_group, ids=ids, where=where, dead_before_ms=dead_before_ms)
        return known_group, chosen

    def _known_for_edit(self, topic: str, group: str) -> tuple[Topic, Group, frozenset[str]]:
        """Returns a topic, a group, and the ids of its newest edited messages."""
        known_topic, known_group = self._known(topic, group)
        with self._lock:
            return known_topic, known_group, frozenset(known_group.edited_ids)

    def _page(self, topic: Topic, group: Group, *, after: int) -> DeadPage:
        options = self._options
        return self._reader.page(
            topic, group, start=after, count_max=options.dead_search_messages_max, bytes_max=options.pull_bytes_max
        )

    def _known(self, topic: str, group: str) -> tuple[Topic, Group]:
        """Returns a topic and a group, whose dead letters are all that have no attempts left."""
        with self._lock:
            self._context.refuse_if_closed()
            known_topic, known_group = self._groups.known_topic(topic), self._groups.known_group(topic, group)
            self._reader.bury_expired(topic, known_group)
        return known_topic, known_group


def _fits(where: DeadFilter, died: DeadRun, record: Record) -> bool:
    return where.fits_death(reason=died.reason, dead_at_ms=died.dead_at_ms) and where.fits_message(
        key=record.key, headers=record.headers
    )
