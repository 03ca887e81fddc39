"""Recurring messages: added, paused and deleted by operators, and published when they occur, by a thread of their own.

An occurrence is published first, and then noted as over. Whatever dies between both, the same occurrence is published
again after the restart, under the same id, and the publisher drops it as a duplicate. So none is lost and none comes
twice, as long as the broker remembers the id: until `dedup_messages_max` others were published, and the repeat is the
first thing that the thread does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.publisher import Publisher
from outbox_broker.recurring.occurrences import Due, cron_schedule
from outbox_broker.recurring.recurring_state import RecurringState
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_core.common.errors import BrokerRefused, InUse, InvalidMessage, OutboxError
from outbox_core.journal.recurring_records import AddedRecurring, DeletedRecurring, FiredRecurring, PausedRecurring
from outbox_core.messages.limits import RECURRING_RUNS_MAX
from outbox_core.messages.message import check_recurring
from outbox_core.messages.recurring_message import RecurringMessage
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringView:
    """A recurring message as operators see it. `next_ms`: its next occurrences, none while it is paused. `failure`: why
    what is due was not published, and is tried again.
    """

    name: str
    message: RecurringMessage
    generation: int
    added_at_ms: int
    fired_to_ms: int
    paused: bool
    next_ms: list[int]
    failure: str | None


class RecurringPublisher:
    """Operators' recurring messages, and the thread that publishes them. An unknown name is a KeyError."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, groups: GroupRegistry, publisher: Publisher
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._lock = context.lock
        self._state = context.state
        self._registry = context.state.recurring
        self._writer = writer
        self._groups = groups
        self._publisher = publisher
        self._firing = threading.Lock()
        """Held while an occurrence is decided on, published and noted, so that none comes after a pause or a deletion
        has returned. Acquired before the engine's lock.
        """
        self._changed = threading.Condition()
        self._is_changed = False
        self._next: dict[str, tuple[int, int, int | None]] = {}
        """When each occurs next, by its generation and the time to which it has fired."""
        self._failures: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="broker-recurring", daemon=True)

    # -- operators ---------------------------------------------------------------------------------------------------

    def add(
        self, name: str, message: RecurringMessage, *, paused: bool = False, quota: ClientTopicQuota | None = None
    ) -> None:
        """Add a recurring message, durably; it occurs from now on. One that is there already, just so, is left alone,
        paused or not.

        `quota`: how many topics its client may have. Raises InvalidMessage, for what is out of bounds and where there
        are as many as there may be; InUse for a name that another one has.
        """
        message.check(name)
        cron_schedule(message.cron, message.tz)
        with self._lock:
            self._context.refuse_if_closed()
            present = self._registry.by_name.get(name)
            if present is None:
                self._refuse_if_full(message.topic, quota)
                self._writer.act(
                    AddedRecurring(
                        name=name, at_ms=self._clock.now_ms(), generation=self._registry.generation + 1,
                        topic=message.topic, cron=message.cron, tz=message.tz, key=message.key,
                        headers=dict(message.headers), body=message.body, catch_up=message.catch_up,
                    )
                )  # fmt: skip
                if paused:  # before the thread can see it without
                    self._writer.act(PausedRecurring(name=name, at_ms=self._clock.now_ms(), paused=True))
            elif present.message != message:
                raise InUse(f"there is a recurring message {name} that differs from this one; delete it first")
            end = self._context.actions.end
        self._context.actions.commit(end)
        if present is None:
            told = {"recurring": name, "topic": message.topic, "cron": message.cron, "tz": message.tz}
            logger.info("recurring_added", extra=told)
        self._wake()

    def pause(self, name: str, *, paused: bool) -> None:
        """Pause a recurring message, or resume it, durably: nothing of it is published after a pause has returned.
        Idempotent. What it misses meanwhile counts as any that was missed.
        """
        check_recurring(name)
        with self._firing:
            with self._lock:
                self._context.refuse_if_closed()
                if self._known(name).paused is not paused:
                    self._writer.act(PausedRecurring(name=name, at_ms=self._clock.now_ms(), paused=paused))
                end = self._context.actions.end
            self._context.actions.commit(end)
        logger.info("recurring_paused" if paused else "recurring_resumed", extra={"recurring": name})
        self._wake()

    def delete(self, name: str) -> None:
        """Delete a recurring message, durably: nothing of it is published after this has returned. What it has
        published stays.
        """
        check_recurring(name)
        with self._firing:
            with self._lock:
                self._context.refuse_if_closed()
                self._known(name)
                self._writer.act(DeletedRecurring(name=name, at_ms=self._clock.now_ms()))
                end = self._context.actions.end
            self._context.actions.commit(end)
        logger.info("recurring_deleted", extra={"recurring": name})

    def names(self) -> list[str]:
        """Returns the names of all, sorted."""
        with self._lock:
            return sorted(self._registry.by_name)

    def topic_of(self, name: str) -> str:
        """Returns the topic that one publishes to."""
        check_recurring(name)
        with self._lock:
            return self._known(name).message.topic

    def view(self, name: str, *, runs: int = 1) -> RecurringView:
        """Returns one, with so many of its next occurrences."""
        check_recurring(name)
        with self._lock:
            recurring = self._known(name)
            added, fired_to_ms, paused = recurring.added, recurring.fired_to_ms, recurring.paused
        next_ms: list[int] = []
        failure: str | None = None
        if not paused:
            failure = self._failures.get(name)
            try:
                schedule = cron_schedule(added.cron, added.tz)
            except InvalidMessage as error:  # its zone is not on this machine
                failure = str(error)
            else:
                next_ms = schedule.following(
                    max(fired_to_ms, self._clock.now_ms()), count=min(runs, RECURRING_RUNS_MAX)
                )
        return RecurringView(
            name=name, message=recurring.message, generation=added.generation, added_at_ms=added.at_ms,
            fired_to_ms=fired_to_ms, paused=paused, next_ms=next_ms, failure=failure,
        )  # fmt: skip

    def _known(self, name: str) -> RecurringState:
        recurring = self._registry.by_name.get(name)
        if recurring is None:
            raise KeyError(f"there is no recurring message {name}")
        return recurring

    def _refuse_if_full(self, topic: str, quota: ClientTopicQuota | None) -> None:
        limit = self._context.options.recurring_messages_max
        if len(self._registry.by_name) >= limit:
            raise InvalidMessage(f"there are {limit} recurring messages already (recurring_messages_max)")
        refused = None if topic in self._state.topics else self._groups.topics_refused(1, quota)
        if refused is not None:
            raise InvalidMessage(refused)

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, if it was started, up to `timeout_s`; the context must be closed before."""
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        with self._changed:
            self._is_changed = True
            self._changed.notify_all()

    def _run(self) -> None:
        slice_ms = self._context.options.clock_slice_ms
        while not self._context.closed:
            wait_ms: int | None = slice_ms  # a full disk is not tried in a tight loop
            try:
                wait_ms = self._fire_all()
            except Exception:  # the thread boundary: if it ended silently, nothing would recur any more
                logger.exception("recurring_failed")
            with self._changed:
                if not (self._is_changed or self._is_closing()):
                    # At most a slice, after which the wall clock is read again: it may have stepped.
                    self._clock.wait(self._changed, None if wait_ms is None else min(wait_ms, slice_ms))
                self._is_changed = False

    def _is_closing(self) -> bool:
        """Returns whether the context was closed; close() sets it from another thread, so it is read anew each time."""
        return self._context.closed

    def _fire_all(self) -> int | None:
        """Publish what is due; returns for how long nothing is, None if there is nothing that recurs."""
        names, soonest_ms = self.names(), None
        for name in names:
            if self._is_closing():
                return None
            try:
                next_ms = self._fire(name)
            except OutboxError as error:
                self._note_failure(name, str(error))
                next_ms = self._clock.now_ms() + self._context.options.clock_slice_ms
            if next_ms is not None:
                soonest_ms = next_ms if soonest_ms is None else min(soonest_ms, next_ms)
        for remembered in (self._next, self._failures):
            for name in remembered.keys() - set(names):
                del remembered[name]
        return None if soonest_ms is None else max(0, soonest_ms - self._clock.now_ms())

    def _fire(self, name: str) -> int | None:
        """Publish what is due of one; returns when it occurs next, None if it does not. Raises OutboxError: then what
        is due stays due.
        """
        with self._firing:
            with self._lock:
                recurring = self._registry.by_name.get(name)
                if recurring is None or recurring.paused:
                    return None
                added, message, fired_to_ms = recurring.added, recurring.message, recurring.fired_to_ms
            next_ms, now_ms = self._next_after(added, fired_to_ms), self._clock.now_ms()
            if next_ms is None or next_ms > now_ms:
                return next_ms
            schedule = cron_schedule(added.cron, added.tz)
            due = schedule.due(after_ms=fired_to_ms, now_ms=now_ms, newest=message.catch_up)
            self._publish(added, message, due, now_ms=now_ms)
            return schedule.after(due.times_ms[-1])

    def _next_after(self, added: AddedRecurring, fired_to_ms: int) -> int | None:
        """Returns when one occurs next; computed once, since it is asked each second."""
        known = self._next.get(added.name)
        if known is not None and known[:2] == (added.generation, fired_to_ms):
            return known[2]
        next_ms = cron_schedule(added.cron, added.tz).after(fired_to_ms)
        self._next[added.name] = added.generation, fired_to_ms, next_ms
        return next_ms

    def _publish(self, added: AddedRecurring, message: RecurringMessage, due: Due, *, now_ms: int) -> None:
        """Publish occurrences, and then note them. Under `_firing`."""
        batch = [
            message.occurrence(added.name, generation=added.generation, at_ms=at_ms, now_ms=now_ms)
            for at_ms in due.times_ms
        ]
        for published in self._publisher.publish(batch):
            if not published.status.is_success:
                raise BrokerRefused(published.error or f"{published.id} was {published.status}")
        with self._lock:
            self._context.refuse_if_closed()
            self._writer.act(
                FiredRecurring(
                    name=added.name, at_ms=now_ms, to_ms=due.times_ms[-1], times_ms=due.times_ms, missed=due.missed
                )
            )
            end = self._context.actions.end
            self._state.counters["recurring_fired", message.topic, ""] += len(batch)
            self._state.counters["recurring_missed", message.topic, ""] += due.missed
        self._context.actions.commit(end)
        self._failures.pop(added.name, None)
        told = {"recurring": added.name, "topic": message.topic, "message_ids": [fired.id for fired in batch]}
        logger.info("recurring_fired", extra=told)
        if due.missed:
            logger.warning("recurring_missed", extra={"recurring": added.name, "missed": due.missed})

    def _note_failure(self, name: str, reason: str) -> None:
        """Tell why what is due was not published: once, until there is another reason."""
        if self._failures.get(name) != reason and not self._is_closing():
            self._failures[name] = reason
            logger.warning("recurring_failed", extra={"recurring": name, "error": reason})
