"""Waits for a state that raises no event of its own. Not for what a caller can be woken by."""

from __future__ import annotations

import threading
from collections.abc import Callable

TRIES_MAX = 120_000


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, for two minutes or more."""
    pause = threading.Event()
    for _ in range(TRIES_MAX):
        if condition():
            return
        pause.wait(0.001)
    raise TimeoutError("it never became true")
