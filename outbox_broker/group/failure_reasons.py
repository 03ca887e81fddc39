"""Stores the failure reasons of a group, each text once and under a number, within a limit of bytes. No I/O.

Runs of messages refer to reasons by number, so the memory and checkpoint size of each message stay small, whatever its
consumers send: with their texts, 100,000 messages of one group took 618 MiB and a checkpoint of 396. Above the limit a
new text is replaced by NOT_KEPT; the action log has all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Final

from outbox_core.messages.failure_history import EXPIRED, REFUSED, History

NOT_KEPT: Final = "not kept: there were too many different reasons at once"
ENTRY_BYTES: Final = 400
"""Size of a reason in its three tables; its text is added to it."""

NumberedHistory = tuple[tuple[int, int], ...]
"""A History with reason numbers in place of texts."""
ReasonTexts = list[tuple[int, str]]
"""Reasons in their serialised form."""

_FIXED: Final = {NOT_KEPT: 0, EXPIRED: 1, REFUSED: 2}
"""Always present, in every group, under numbers that checkpoints contain: none may change."""
_FIXED_TEXTS: Final = {reason_number: text for text, reason_number in _FIXED.items()}


@dataclass(slots=True)
class ReasonBudget:
    """Byte limit for the reasons of all groups together. Each group may use `group_bytes_min` beyond that, so that no
    group's texts push out another's.
    """

    bytes_max: int = 16 * 1024 * 1024
    group_bytes_min: int = 64 * 1024
    size_bytes: int = 0


class Reasons:
    """The reasons of one group. forget_unused() drops the texts that no run refers to any more."""

    def __init__(self, budget: ReasonBudget | None = None) -> None:
        self._budget = ReasonBudget() if budget is None else budget
        self._numbers: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        self._unused: set[int] = set()
        self._newest = max(_FIXED_TEXTS)
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Returns the approximate size in bytes."""
        return self._size_bytes

    def number_of(self, text: str) -> int:
        """Returns the number of a reason, which is stored if there is space."""
        reason_number = _FIXED.get(text, self._numbers.get(text))
        if reason_number is not None:
            return reason_number
        if not self._has_room(_entry_bytes(text)):
            return _FIXED[NOT_KEPT]
        self._store(self._newest + 1, text)
        return self._newest

    def text(self, reason_number: int) -> str:
        """Returns the reason under a number."""
        fixed_text = _FIXED_TEXTS.get(reason_number)
        return self._texts[reason_number] if fixed_text is None else fixed_text

    def history_of(self, history: NumberedHistory) -> History:
        """Returns a history with its texts."""
        return tuple((self.text(reason_number), attempts) for reason_number, attempts in history)

    def use(self, reason: int | None, history: NumberedHistory, *, more: int) -> None:
        """Count a run that refers to these reasons, or (`more` is -1) one that no longer does."""
        for reason_number in (reason, *(reason_number for reason_number, _ in history)):
            if reason_number is None or reason_number in _FIXED_TEXTS:
                continue
            self._uses[reason_number] += more
            if self._uses[reason_number]:
                self._unused.discard(reason_number)
            else:
                self._unused.add(reason_number)

    def forget_unused(self) -> None:
        """Drop reasons that no run refers to; not to be called while runs are temporarily out of their table."""
        for reason_number in self._unused:
            text = self._texts.pop(reason_number)
            del self._numbers[text], self._uses[reason_number]
            self._resize(-_entry_bytes(text))
        self._unused.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._unused.update(self._texts)
        self.forget_unused()

    def capture(self) -> ReasonTexts:
        """Returns all reasons, for restore()."""
        return list(self._texts.items())

    def restore(self, texts: Sequence[tuple[int, str]]) -> None:
        """Load captured reasons into an empty instance, before the runs are added."""
        for reason_number, text in texts:
            self._store(reason_number, text)

    def _has_room(self, more: int) -> bool:
        budget = self._budget
        return self._size_bytes + more <= budget.group_bytes_min or budget.size_bytes + more <= budget.bytes_max

    def _store(self, reason_number: int, text: str) -> None:
        self._numbers[text], self._texts[reason_number], self._uses[reason_number] = reason_number, text, 0
        self._unused.add(reason_number)
        self._newest = max(self._newest, reason_number)
        self._resize(_entry_bytes(text))

    def _resize(self, more: int) -> None:
        self._size_bytes += more
        self._budget.size_bytes += more


def _entry_bytes(text: str) -> int:
    return ENTRY_BYTES + getsizeof(text)
