"""Worker threads for blocking work, so that the event loop never waits for a disk or a lock.

Not even for the sync of a request that is alone: a disk that stalls would stall probes, refusals and pulls as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from outbox_broker.http.http_settings import HttpSettings

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerThreads:
    """Pools of fixed size, so that no class of work blocks another: a full disk stops publishes, not acks.

    Long computations share one thread: threads that compute take turns at the interpreter, milliseconds each, and the
    event loop would wait for a turn of every one of them whenever it returns from the network. Beside sixteen pages of
    dead letters, one a thread, the longest answer of /livez took 580 and 661 ms; with one thread for pages 70 and 299.
    """

    publish: ThreadPoolExecutor
    long_publish: ThreadPoolExecutor
    """Publishes of more than content_negotiation.LONG_BYTES."""
    settle: ThreadPoolExecutor
    pull: ThreadPoolExecutor
    page: ThreadPoolExecutor
    """Pages of stored data."""
    operate: ThreadPoolExecutor
    """Probes and metrics."""

    @classmethod
    def of(cls, settings: HttpSettings) -> WorkerThreads:
        """Create the pools of one server; threads start on demand."""
        return cls(
            publish=ThreadPoolExecutor(settings.publish_threads, "broker-publish"),
            long_publish=ThreadPoolExecutor(1, "broker-long-publish"),
            settle=ThreadPoolExecutor(settings.settle_threads, "broker-settle"),
            pull=ThreadPoolExecutor(settings.pull_threads, "broker-pull"),
            page=ThreadPoolExecutor(1, "broker-page"),
            operate=ThreadPoolExecutor(2, "broker-operate"),
        )

    def close(self) -> None:
        """Stop the threads after their current work. Idempotent."""
        for pool in fields(self):
            getattr(self, pool.name).shutdown(wait=False, cancel_futures=True)


async def in_thread(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Like run_in_executor(), without its intermediate future, which costs as much as a small request's work."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outcome: _Outcome[Result] = _Outcome()
    pool.submit(_run, work, outcome, loop, done)
    await done
    return outcome.take()


@dataclass(slots=True)
class _Outcome(Generic[Result]):
    """The result of work; taken once, so that no error forms a reference cycle with the frames that raised it: such a
    cycle would keep all data of the request until the next garbage collection.
    """

    result: Result | None = None
    error: BaseException | None = None

    def take(self) -> Result:
        """Returns the result. Raises the error."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is None:
            return result  # type: ignore[return-value]  # where there is no error it is one
        try:
            raise error
        finally:
            del error


def _run(
    work: Callable[[], Result], outcome: _Outcome[Result], loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]
) -> None:
    try:
        outcome.result = work()
    except BaseException as error:  # noqa: BLE001  (it belongs to the request, which raises it)
        outcome.error = error
    with suppress(RuntimeError):  # the loop has ended, and with it the request
        loop.call_soon_threadsafe(_finish, done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.set_result(None)
