"""An event loop in a separate thread, which runs coroutines for synchronous code. Not a scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines that other threads wait for. One loop for each runner, since an AsyncEngine's connections belong
    to one loop.

    asyncio ends a loop when a task raises SystemExit or KeyboardInterrupt, and a thread that waits for a coroutine in
    it would wait forever: this loop continues.
    """

    def __init__(self, *, exits: Callable[[BaseException], None], name: str = "consumer-event-loop") -> None:
        """`exits` is called in the loop's thread with a SystemExit or KeyboardInterrupt that a handler's task raised.
        `name` is the thread's.
        """
        self._exits = exits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError if the process can have no more threads."""
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def is_alive(self) -> bool:
        """Returns whether coroutines can be run."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, in the caller's context, and wait; its error is raised here."""
        returned, error = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop).result()
        if error is not None:
            raise error
        return returned[0]

    def stop(self, *, timeout_seconds: float) -> bool:
        """End the loop, which must be unused; returns whether it ended in time."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True

    def _run(self) -> None:
        """Runs the loop until stop()."""
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                self._exits(error)
            else:
                return


async def _outcome(coroutine: Coroutine[Any, Any, T]) -> tuple[list[T], BaseException | None]:
    """Returns the coroutine's result or error: a task must not raise what would end its loop or look like a cancel."""
    try:
        return [await coroutine], None
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        return [], error
