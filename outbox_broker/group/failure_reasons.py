"""The reasons of a group's failed attempts, each text kept once and under a number, within a bound of bytes. No I/O.

Runs of messages refer to reasons by number, so what memory and a checkpoint have of each message is small, whatever its
consumers say. Beyond the bound a new text is not kept, and NOT_KEPT stands for it; the action log has all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Final

from outbox_core.messages.failure_history import EXPIRED, REFUSED, History

NOT_KEPT: Final = "not kept: there were too many different reasons at once"
ENTRY_BYTES: Final = 400
"""A reason in three tables; its text besides."""

NumberedHistory = tuple[tuple[int, int], ...]
"""A History by the numbers of its reasons."""
ReasonTexts = list[tuple[int, str]]
"""Reasons as they are written down."""

_FIXED: Final = {NOT_KEPT: 0, EXPIRED: 1, REFUSED: 2}
"""Always kept, in every group, under numbers that checkpoints hold: none may change."""
_FIXED_TEXTS: Final = {number: text for text, number in _FIXED.items()}


@dataclass(slots=True)
class ReasonBudget:
    """How many bytes the reasons of all groups may take together; `group_bytes_min` beyond that is any group's own."""

    bytes_max: int = 16 * 1024 * 1024
    group_bytes_min: int = 64 * 1024
    size_bytes: int = 0


class Reasons:
    """One group's. A text goes with the last run that refers to it, once forget_unused() is called."""

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
        """About how many bytes they take."""
        return self._size_bytes

    def number_of(self, text: str) -> int:
        """The number of a reason, which is kept from now on where there is room."""
        number = _FIXED.get(text, self._numbers.get(text))
        if number is not None:
            return number
        if not self._has_room(_entry_bytes(text)):
            return _FIXED[NOT_KEPT]
        self._keep(self._newest + 1, text)
        return self._newest

    def text(self, number: int) -> str:
        """The reason under a number."""
        found = _FIXED_TEXTS.get(number)
        return self._texts[number] if found is None else found

    def history_of(self, history: NumberedHistory) -> History:
        """A history with its texts."""
        return tuple((self.text(number), attempts) for number, attempts in history)

    def use(self, reason: int | None, history: NumberedHistory, *, more: int) -> None:
        """Count a run that refers to these, or (`more` is -1) one that does so no longer."""
        for number in (reason, *(one for one, _ in history)):
            if number is None or number in _FIXED_TEXTS:
                continue
            self._uses[number] += more
            if self._uses[number]:
                self._unused.discard(number)
            else:
                self._unused.add(number)

    def forget_unused(self) -> None:
        """Let go of what no run refers to; not while runs are out of their table only to change."""
        for number in self._unused:
            text = self._texts.pop(number)
            del self._numbers[text], self._uses[number]
            self._resize(-_entry_bytes(text))
        self._unused.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self._unused.update(self._texts)
        self.forget_unused()

    def capture(self) -> ReasonTexts:
        """All that is kept, as restore() takes it."""
        return list(self._texts.items())

    def restore(self, texts: Sequence[tuple[int, str]]) -> None:
        """Keep what was captured; to be called where nothing is kept yet, before the runs are added."""
        for number, text in texts:
            self._keep(number, text)

    def _has_room(self, more: int) -> bool:
        budget = self._budget
        return self._size_bytes + more <= budget.group_bytes_min or budget.size_bytes + more <= budget.bytes_max

    def _keep(self, number: int, text: str) -> None:
        self._numbers[text], self._texts[number], self._uses[number] = number, text, 0
        self._unused.add(number)
        self._newest = max(self._newest, number)
        self._resize(_entry_bytes(text))

    def _resize(self, more: int) -> None:
        self._size_bytes += more
        self._budget.size_bytes += more


def _entry_bytes(text: str) -> int:
    return ENTRY_BYTES + getsizeof(text)
