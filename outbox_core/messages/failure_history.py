"""The failure history of a message: the reasons of its failed attempts, each with its count of repeats. Pure.

Without times: messages that fail together have equal histories, which dead letters share, at 32 bytes each. With times
a million of them would need some hundred MiB; the action log has the time of every attempt.
"""

from __future__ import annotations

from typing import Final, TypeVar

HISTORY_MAX: Final = 8
"""The number of entries that are kept, the newest ones."""
REFUSED: Final = "refused by its consumer"
EXPIRED: Final = "invisible time ran out"

History = tuple[tuple[str, int], ...]
"""(reason, attempts that failed with it one after the other), oldest first."""
Reason = TypeVar("Reason")


def failed(history: tuple[tuple[Reason, int], ...], reason: Reason) -> tuple[tuple[Reason, int], ...]:
    """Returns the history after one more failed attempt; reasons may be given by number."""
    if history and history[-1][0] == reason:
        return (*history[:-1], (reason, history[-1][1] + 1))
    return (*history, (reason, 1))[-HISTORY_MAX:]


def with_count(reason: str, attempts: int) -> str:
    """Returns a reason that no consumer gave, as a dead letter shows it."""
    return f"{reason}, {attempts} attempts"


def without_count(reason: str, attempts: int) -> str:
    """Returns the reason that with_count() was given; any other reason unchanged."""
    return reason.removesuffix(f", {attempts} attempts")
