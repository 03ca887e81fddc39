"""Pulls that wait for nothing: what was written lately, and little. Not what is chosen, nor how it is handed out."""

from __future__ import annotations

from typing import Final

from broker.pulling import Choice, Handed, Pulling

AT_HAND_BYTES_MAX: Final = 64 * 1024
AT_HAND_BEHIND_BYTES_MAX: Final = 4 * 1024 * 1024
"""What was written lately is in the page cache: reading a little of it waits for no disk."""


class AtHand(Pulling):
    """Hand-outs for a caller that must not be held up, as an event loop."""

    def take_at_hand(
        self, topic: str, group: str, *, max_messages: int, invisible_ms: int, consumer: str | None = None
    ) -> list[Handed] | None:
        """take(), where that waits for nothing: no lock, no disk, no other pull. None, with nothing handed out, where
        it might: then call take(), in a thread that may wait.
        """
        if self._may_be_due() or not self._lock.acquire(blocking=False):
            return None
        try:
            self._refuse_if_closed()
            found_topic, found = self._state.topics.get(topic), self._state.group(topic, group)
            if found_topic is None or found is None or found.accepts is not None or found.order is not None:
                return None
            if self._actions.is_full or not found.pulling.acquire(blocking=False):
                return None  # a checkpoint is due, which is synced
            try:
                choice = self._choose(found_topic, found, count_max=max_messages)
                if choice is None:
                    return []
                if not self._is_at_hand(choice):
                    return None
                records = self._read(choice)
                return (
                    self._hand_out(found_topic, found, choice, records, invisible_ms=invisible_ms, consumer=consumer)
                    or None
                )
            finally:
                found.pulling.release()
        finally:
            self._lock.release()

    def _is_at_hand(self, choice: Choice) -> bool:
        runs = [run for found in choice.runs for run in found]
        oldest = self._messages.end - AT_HAND_BEHIND_BYTES_MAX
        return sum(run.size_bytes for run in runs) <= AT_HAND_BYTES_MAX and all(run.offset >= oldest for run in runs)
