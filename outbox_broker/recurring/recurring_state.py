"""The state of the recurring messages of one broker. Which of their occurrences are due, occurrences.py tells."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_core.journal.recurring_records import AddedRecurring, DeletedRecurring, FiredRecurring, PausedRecurring
from outbox_core.messages.recurring_message import RecurringMessage

RecurringAction = AddedRecurring | PausedRecurring | DeletedRecurring | FiredRecurring


@dataclass(slots=True, kw_only=True)
class RecurringState:
    """A recurring message. Its occurrences up to `fired_to_ms` are over; that never goes back."""

    added: AddedRecurring
    fired_to_ms: int
    paused: bool = False

    @property
    def message(self) -> RecurringMessage:
        """What it publishes, and when."""
        added = self.added
        return RecurringMessage(
            topic=added.topic, cron=added.cron, tz=added.tz, key=added.key, headers=added.headers, body=added.body,
            catch_up=added.catch_up,
        )  # fmt: skip


class RecurringRegistry:
    """Recurring messages by name. Changed under the engine's lock, and by replay before the engine is open."""

    def __init__(self) -> None:
        self.by_name: dict[str, RecurringState] = {}
        self.generation = 0
        """The highest that was given: one that is added again has another, and so other ids."""

    def replay(self, action: RecurringAction) -> None:
        """Apply a record of the action log. One of a name that is not there is passed over: damage took it."""
        if isinstance(action, AddedRecurring):
            self.restore(RecurringState(added=action, fired_to_ms=action.at_ms))
            return
        recurring = self.by_name.get(action.name)
        if recurring is None:
            return
        match action:
            case PausedRecurring():
                recurring.paused = action.paused
            case DeletedRecurring():
                del self.by_name[action.name]
            case FiredRecurring():
                recurring.fired_to_ms = max(recurring.fired_to_ms, action.to_ms)

    def restore(self, recurring: RecurringState) -> None:
        """Have one as it was."""
        self.by_name[recurring.added.name] = recurring
        self.generation = max(self.generation, recurring.added.generation)

    def of_topic(self, topic: str) -> list[str]:
        """Returns the names of those that publish to a topic, sorted."""
        return sorted(name for name, recurring in self.by_name.items() if recurring.added.topic == topic)
