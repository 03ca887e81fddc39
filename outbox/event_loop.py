"""One event loop in a thread of its own, for handlers that are `async def`. Not a scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines that other threads wait for. One loop a runner: an AsyncEngine's connections belong to one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="consumer-event-loop", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop, in the caller's context, and wait; what it raises is raised here."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stop(self, *, timeout_seconds: float) -> bool:
        """End the loop, which nobody uses any more; True when it did in time."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True
