"""An event loop in a separate thread, which runs coroutines for synchronous code. Not a scheduler."""

from __future__ import annotations

import asyncio
import threading
import time
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
        self._stops = False
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

    def is_current(self) -> bool:
        """Returns whether the caller runs in the loop's thread, where waiting for a coroutine would never end."""
        return self._thread is threading.current_thread()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, in the caller's context, and wait; its error is raised here."""
        returned, error = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop).result()
        if error is not None:
            raise error
        return returned[0]

    def cancel_left_tasks(self, *, timeout_seconds: float | None) -> bool:
        """Cancel the tasks that were left behind, as asyncio.run() does at its end; returns whether they ended in time,
        None: however long they take. What runs in run() is not cancelled.
        """
        # At the time-out it is left and goes on: what a busy loop has not begun would be cancelled unawaited.
        cancelling = asyncio.run_coroutine_threadsafe(_outcome(_cancel_left_tasks()), self._loop)
        try:
            _, error = cancelling.result(timeout_seconds)
        except TimeoutError:
            return False
        if error is not None:
            raise error
        return True

    def stop(self, *, timeout_seconds: float | None) -> bool:
        """Cancel the tasks that are left, and end the loop, which must be unused; returns whether all ended in time,
        None: however long they take. What did not is left to the loop's daemon thread.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self.cancel_left_tasks(timeout_seconds=timeout_seconds):
            return False
        self._stops = True  # before the call: a task's SystemExit in the same round makes the loop forget it
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
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
                if self._stops:
                    return
            else:
                return


async def _cancel_left_tasks() -> None:
    """Cancel all tasks that nobody waits for, wait for their ends, and report the errors of those that failed.

    Those of run() are waited for, this one among them: one that began late would cancel what was begun since.
    """
    run_code = _outcome.__code__
    left_tasks = {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "cr_code", None) is not run_code}
    for task in left_tasks:
        task.cancel()
    await asyncio.gather(*left_tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    for task in left_tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {"message": "a left task failed while it was cancelled", "exception": error, "task": task}
            )
    await loop.shutdown_asyncgens()


async def _outcome(coroutine: Coroutine[Any, Any, T]) -> tuple[list[T], BaseException | None]:
    """Returns the coroutine's result or error: a task must not raise what would end its loop or look like a cancel."""
    try:
        return [await coroutine], None
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        return [], error
