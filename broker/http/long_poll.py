"""Long polls: who waits for which group, in turn, without a thread each. How messages are taken is the caller's.

All of it runs on the event loop, except Line.signal(). One line stands for each (topic, group) with somebody waiting;
the engine wakes the line, and the line serves its waiters first come, first served until a pull comes back empty. So
a message that a thousand wait for costs two pulls, not a thousand.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Taken:
    """What a pull handed out: the answer, ready to send, and the receipts, to give it back where it cannot be sent."""

    answer: bytes
    receipts: list[str]


Take = Callable[[], Awaitable[Taken | None]]
"""One pull; None where nothing was ready."""
Subscribe = Callable[[str, str, Callable[[], None]], Callable[[], None]]
"""Engine.subscribe: (topic, group, wake) -> unsubscribe."""


@dataclass(eq=False, slots=True)
class _Waiter:
    take: Take
    future: asyncio.Future[Taken | None]
    served: bool = False
    leaving: bool = False

    def is_leaving(self) -> bool:
        """Whether it stopped waiting; asked anew after each await, in which it may have."""
        return self.leaving

    def settle(self, taken: Taken | None) -> None:
        """Give the waiter its answer, unless it was given up in the meantime."""
        if not self.future.done():
            self.future.set_result(taken)


@dataclass(eq=False, slots=True)
class _Line:
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)
    signaled: bool = False
    unsubscribe: Callable[[], None] | None = None
    server: asyncio.Task[None] | None = None

    def signal(self) -> None:
        """Wake the line, from any thread. `signaled` is cleared before a pull, which sees what a wake was for."""
        if not self.signaled:
            self.signaled = True
            try:
                self.loop.call_soon_threadsafe(self.woken.set)
            except RuntimeError:  # the loop has ended: so has everybody who waited
                return


class LongPolls:
    """The lines of one server."""

    def __init__(self, subscribe: Subscribe) -> None:
        self._subscribe = subscribe
        self._lines: dict[tuple[str, str], _Line] = {}
        self._stopping = False

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return sum(len(line.waiters) for line in self._lines.values())

    async def wait(
        self, topic: str, group: str, *, take: Take, timeout_s: float, gone: asyncio.Future[None]
    ) -> Taken | None:
        """Wait in line until `take` brings something; None when time ran out, the client has gone or the server stops.

        A `take` that has begun is waited for, since what it took is already handed out.
        """
        if self._stopping:
            return None
        waiter = _Waiter(take, asyncio.get_running_loop().create_future())
        line = self._join(topic, group, waiter)
        try:
            ends: set[asyncio.Future[Any]] = {waiter.future, gone}
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            waiter.leaving = True
            return await waiter.future if waiter.served else None
        finally:
            self._leave(topic, group, line, waiter)

    def stop(self) -> None:
        """Send everybody away empty-handed, now and from now on."""
        self._stopping = True
        for line in self._lines.values():
            for waiter in line.waiters:
                waiter.leaving = True
                if not waiter.served:
                    waiter.settle(None)

    def _join(self, topic: str, group: str, waiter: _Waiter) -> _Line:
        line = self._lines.get((topic, group))
        if line is None:
            line = self._lines[topic, group] = _Line(asyncio.get_running_loop())
            line.unsubscribe = self._subscribe(topic, group, line.signal)
            line.server = asyncio.create_task(_serve(line))
            line.woken.set()  # something may have come between the pull before this and the subscription
        line.waiters[waiter] = None
        return line

    def _leave(self, topic: str, group: str, line: _Line, waiter: _Waiter) -> None:
        line.waiters.pop(waiter, None)
        if not line.waiters and self._lines.get((topic, group)) is line:
            del self._lines[topic, group]
            if line.unsubscribe is not None:
                line.unsubscribe()
            if line.server is not None:
                line.server.cancel()


async def _serve(line: _Line) -> None:
    while True:
        await line.woken.wait()
        line.woken.clear()
        line.signaled = False
        while line.waiters and await _serve_first(line):
            pass


async def _serve_first(line: _Line) -> bool:
    """Pull for the first in line; whether the next one may find something, too."""
    waiter = next(iter(line.waiters))
    if waiter.is_leaving() or waiter.future.done():
        line.waiters.pop(waiter, None)
        return True
    waiter.served = True
    try:
        taken = await waiter.take()
    except Exception as error:  # noqa: BLE001  (it belongs to the waiter, who raises it)
        if not waiter.future.done():
            waiter.future.set_exception(error)
        line.waiters.pop(waiter, None)
        return True
    if taken is None:
        waiter.served = False
        if waiter.is_leaving():
            waiter.settle(None)
        return False
    waiter.settle(taken)
    line.waiters.pop(waiter, None)
    return True
