"""AsyncBackground: an AsyncEngine's own connections for code that does not await, as the sender's thread is.

A second driver could be given neither the engine's connect_args nor its creator. Not a pool: connections are the second
engine's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.store.event_loop import EventLoopThread

T = TypeVar("T")
STOP_SECONDS_MAX: Final = 5.0

logger: logging.Logger = logging.getLogger(__name__)


class AsyncBackground:
    """Runs transactions on an async driver, in an event loop of its own thread, while the caller waits.

    Safe in any thread, also in one that runs an event loop. The thread is there from the first transaction to
    dispose(), and comes again with the next one. A creator is called in that thread's event loop.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine`: the synchronous face of an async one; nobody else uses its connections."""
        self._engine = AsyncEngine(engine)
        self._lock = threading.Lock()
        self._loop: EventLoopThread | None = None
        self._running = 0
        self._disposed = False
        self._of_the_parent: list[EventLoopThread] = []

    @property
    def url(self) -> URL:
        """Where the database is."""
        return self._engine.url

    def transact(self, work: Callable[[Connection], T]) -> T:
        """Begin, run the work, and commit; what it raises rolls back and is raised on."""
        loop = self._enter()
        try:
            return loop.run(self._transact(work))
        finally:
            self._leave()

    def dispose(self, *, close: bool = True) -> None:
        """Close the connections, at once or behind the transactions that run. Without `close`, in a forked child: leave
        them to the parent.
        """
        if not close:
            self._forget_the_parents()
            return
        with self._lock:
            self._disposed = True
            loop = self._let_go()
        if loop is not None:
            self._end(loop)

    async def _transact(self, work: Callable[[Connection], T]) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    def _enter(self) -> EventLoopThread:
        with self._lock:
            if self._loop is None:
                self._loop = EventLoopThread(exits=_log_exit, name="outbox-event-loop")
                self._loop.start()
                self._disposed = False
            self._running += 1
            return self._loop

    def _leave(self) -> None:
        """The last one out, behind dispose(), closes the connections."""
        with self._lock:
            self._running -= 1
            loop = self._let_go() if self._disposed else None
        if loop is not None:
            self._end(loop)

    def _let_go(self) -> EventLoopThread | None:
        """The loop, where nobody is in it. The caller has the lock."""
        if self._running:
            return None
        loop, self._loop = self._loop, None
        return loop

    def _end(self, loop: EventLoopThread) -> None:
        try:
            loop.run(self._engine.dispose())
        finally:
            loop.stop(timeout_seconds=STOP_SECONDS_MAX)

    def _forget_the_parents(self) -> None:
        self._engine.sync_engine.dispose(close=False)
        self._lock = threading.Lock()
        if self._loop is not None:
            self._of_the_parent.append(self._loop)  # kept: a loop that is let go of says that it was not closed
        self._loop, self._running, self._disposed = None, 0, False


def transact(engine: Engine | AsyncBackground, work: Callable[[Connection], T]) -> T:
    """Run the work in a transaction of background connections, of whichever kind."""
    if isinstance(engine, AsyncBackground):
        return engine.transact(work)
    with engine.begin() as connection:
        return work(connection)


def _log_exit(error: BaseException) -> None:
    """A task that a creator started has raised SystemExit or KeyboardInterrupt, which ends nothing here."""
    logger.error("background_task_exited", extra={"error": type(error).__name__})
