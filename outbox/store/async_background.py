"""AsyncBackground: runs synchronous code, as the sender's, on connections of an AsyncEngine.

It uses the engine's own driver: a synchronous one could not use its connect_args and creator. Not a pool: connections
belong to the second engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.store.event_loop_thread import EventLoopThread
from outbox.store.fork_gate import fork_gate
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork

T = TypeVar("T")
STOP_SECONDS_MAX: Final = 5.0

logger: EventLogger = EventLogger(__name__)


class AsyncBackground:
    """Runs transactions on an async driver, in an event loop in a separate thread, while the caller waits.

    Safe in any thread, also in one that runs an event loop. The thread runs from the first transaction to
    dispose(), and is started again by the next one. A creator is called in that thread's event loop.
    """

    def __init__(self, engine: Engine) -> None:
        """`engine`: the sync_engine of an async engine; no other code may use its connections."""
        self._engine = AsyncEngine(engine)
        self._lock = threading.Lock()
        self._loop: EventLoopThread | None = None
        self._running = 0
        self._disposed = False
        self._parent_loops: list[EventLoopThread] = []

    @property
    def url(self) -> URL:
        """Returns the database's URL."""
        return self._engine.url

    def transact(self, work: Callable[[Connection], T]) -> T:
        """Begin, run the work, and commit; an error rolls back and is re-raised."""
        loop = self._enter()
        try:
            return loop.run(self._transact(work))
        finally:
            self._leave()

    def dispose(self, *, close: bool = True) -> None:
        """Close the connections, now or after the running transactions. `close=False`, in a forked child: leave them to
        the parent.
        """
        if not close:
            self._abandon_parent_loop()
            return
        with self._lock:
            self._disposed = True
            loop = self._detach_idle_loop()
        if loop is not None:
            self._end(loop)

    async def _transact(self, work: Callable[[Connection], T]) -> T:
        async with self._engine.begin() as connection:
            return await connection.run_sync(work)

    def _enter(self) -> EventLoopThread:
        with self._lock:
            if self._loop is None:
                loop = EventLoopThread(exits=_log_exit, name="outbox-event-loop")
                loop.start()  # first: one that could not be started would never run what waits for it
                self._loop, self._disposed = loop, False
            self._running += 1
            return self._loop

    def _leave(self) -> None:
        """The last transaction that ends after dispose() closes the connections."""
        with self._lock:
            self._running -= 1
            loop = self._detach_idle_loop() if self._disposed else None
        if loop is not None:
            self._end(loop)

    def _detach_idle_loop(self) -> EventLoopThread | None:
        """Detaches and returns the loop if no transaction uses it. The caller holds the lock."""
        if self._running:
            return None
        loop, self._loop = self._loop, None
        return loop

    def _end(self, loop: EventLoopThread) -> None:
        try:
            loop.run(self._engine.dispose())
        finally:
            loop.stop(timeout_seconds=STOP_SECONDS_MAX)

    def _abandon_parent_loop(self) -> None:
        self._engine.sync_engine.dispose(close=False)
        self._lock = threading.Lock()
        if self._loop is not None:
            self._parent_loops.append(self._loop)  # kept: a collected loop warns that it was not closed
        self._loop, self._running, self._disposed = None, 0, False


def transact(engine: Engine | AsyncBackground, work: Callable[[Connection], T]) -> T:
    """Run the work in a transaction on a background connection, sync or async; a fork waits for its end."""
    notice_fork()
    with fork_gate.transaction():
        if isinstance(engine, AsyncBackground):
            return engine.transact(work)
        with engine.begin() as connection:
            return work(connection)


def _log_exit(error: BaseException) -> None:
    """Log a SystemExit or KeyboardInterrupt that a task of a creator has raised; it ends nothing here."""
    logger.error("background_task_exited", extra={"error": type(error).__name__})
