"""How the attempts at a message went, in short: what went wrong, and how many times in a row. Pure."""

from __future__ import annotations

from typing import Final, TypeVar

HISTORY_MAX: Final = 8
"""So many entries are kept, the newest ones."""
REFUSED: Final = "refused by its consumer"
EXPIRED: Final = "invisible time ran out"

History = tuple[tuple[str, int], ...]
"""(reason, attempts that failed with it one after the other), oldest first."""
Reason = TypeVar("Reason")


def failed(history: tuple[tuple[Reason, int], ...], reason: Reason) -> tuple[tuple[Reason, int], ...]:
    """The history after one more failed attempt; reasons may stand under numbers."""
    if history and history[-1][0] == reason:
        return (*history[:-1], (reason, history[-1][1] + 1))
    return (*history, (reason, 1))[-HISTORY_MAX:]


def with_count(reason: str, attempts: int) -> str:
    """A reason that nobody gave, as a dead letter tells it."""
    return f"{reason}, {attempts} attempts"


def without_count(reason: str, attempts: int) -> str:
    """What with_count() was given; any other reason as it is."""
    return reason.removesuffix(f", {attempts} attempts")
