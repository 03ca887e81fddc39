"""LogInterval: what happens with each batch is logged once a minute for each topic, or whatever the lines differ in."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final

from outbox_core.common.clock import Clock

LOG_AGAIN_MS: Final = 60_000
LOG_KEYS_MAX: Final = 1_000
"""The limit of remembered keys; the one whose line is the oldest is forgotten first."""


class LogInterval:
    """The keys of which a line was logged within the last minute. Thread-safe: batches are sent by several threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[Hashable, tuple[int, int]] = {}

    def passed_over(self, key: Hashable) -> int | None:
        """Returns how many lines of a key were left out since its last one, if one is to be logged now; None if this
        one is to be left out.
        """
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            logged_at_ms, left_out = self._logged.get(key, (now_ms - LOG_AGAIN_MS, 0))
            if now_ms - logged_at_ms < LOG_AGAIN_MS:
                self._logged[key] = (logged_at_ms, left_out + 1)
                return None
            self._logged.pop(key, None)  # so that the oldest line stays the first entry
            self._logged[key] = (now_ms, 0)
            if len(self._logged) > LOG_KEYS_MAX:
                del self._logged[next(iter(self._logged))]
            return left_out

    def is_time(self, key: Hashable) -> bool:
        """Returns whether a line of a key is to be logged now."""
        return self.passed_over(key) is not None
