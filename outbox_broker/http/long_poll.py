"""Long polls: queues of waiting pulls by group, without a thread each. How messages are taken is the caller's.

All of it runs on the event loop, except Line.signal(). Each (topic, group) with waiters has one line; the engine wakes
the line, and the line serves its waiters in order of arrival until a pull comes back empty. So a message that a
thousand wait for costs two pulls, not a thousand. A line outlives its last waiter for a while: the next pull of a
consumer need not be tried if nothing has arrived since an empty one. Readers of a broadcast all wait for the same
message: their line serves each on arrival, and all of them when something has come.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from outbox_broker.engine.topic_reader import READERS


@dataclass(frozen=True, slots=True)
class PolledMessages:
    """The result of a pull: the response, ready to send, and the receipts, to give them back if it cannot be sent."""

    answer: bytes | bytearray
    receipts: list[str]


Take = Callable[[], Awaitable[PolledMessages | None]]
"""One pull; None if nothing was ready."""
Subscribe = Callable[[str, str, Callable[[], None]], Callable[[], None]]
"""Engine.subscribe: (topic, group, wake) -> unsubscribe."""


@dataclass(eq=False, slots=True)
class _Waiter:
    take: Take
    future: asyncio.Future[PolledMessages | None]
    served: bool = False
    leaving: bool = False

    def leave(self, *_: object) -> None:
        """Stop waiting. A `take` in progress is awaited, since its messages are already delivered."""
        self.leaving = True
        if not self.served:
            self.settle(None)

    def is_leaving(self) -> bool:
        """Returns whether it stopped waiting; to be checked again after each await."""
        return self.leaving

    def settle(self, taken: PolledMessages | None) -> None:
        """Complete the waiter, unless it was completed in the meantime."""
        if not self.future.done():
            self.future.set_result(taken)


@dataclass(eq=False, slots=True)
class _Line:
    loop: asyncio.AbstractEventLoop
    is_common: bool = False
    """Whether all waiters get the same messages, each from its own offset (broadcast readers)."""
    waiters: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)
    newcomers: list[_Waiter] = field(default_factory=list)
    """Waiters of a common line that were not served yet: there may be something for them alone."""
    signaled: bool = True
    """Whether something may have come since the last empty pull. Cleared before a pull, which sees what came before."""
    unsubscribe: Callable[[], None] | None = None
    server: asyncio.Task[None] | None = None
    ending: asyncio.TimerHandle | None = None

    def signal(self) -> None:
        """Wake the line, from any thread."""
        if not self.signaled:
            self.signaled = True
            try:
                self.loop.call_soon_threadsafe(self.serve)
            except RuntimeError:  # the loop has ended, and with it all waiters
                return

    def serve(self) -> None:
        """Start serving the waiters, if something may have come, and serving is not in progress."""
        if self.waiters and (self.signaled or self.newcomers) and self.server is None:
            self.server = self.loop.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            while self.waiters and (self.signaled or self.newcomers):
                if self.is_common:
                    await self._serve_readers()
                    continue
                self.signaled = False
                while self.waiters and await _serve_one(self, next(iter(self.waiters))):
                    if self.waiters:
                        await asyncio.sleep(0)  # let other tasks run
                if not self.waiters:
                    self.signaled = True  # there may be more than they took
        finally:
            self.server = None

    async def _serve_readers(self) -> None:
        readers = list(self.waiters) if self.signaled else self.newcomers
        self.signaled, self.newcomers = False, []
        for waiter in readers:
            if waiter in self.waiters:
                await _serve_one(self, waiter)
                await asyncio.sleep(0)


class LongPolls:
    """The lines of one server."""

    def __init__(self, subscribe: Subscribe, *, idle_queue_ms: int, idle_queues_max: int) -> None:
        """A line is kept for `idle_queue_ms` after its last waiter; not where there are `idle_queues_max` lines."""
        self._subscribe = subscribe
        self._idle_s = idle_queue_ms / 1000
        self._idle_max = idle_queues_max
        self._lines: dict[tuple[str, str], _Line] = {}
        self._stopping = False

    @property
    def waiting(self) -> int:
        """The number of waiters now."""
        return sum(len(line.waiters) for line in self._lines.values())

    def waiting_in(self, topic: str, group: str) -> int:
        """Returns how many wait for a group; callable from any thread."""
        line = self._lines.get((topic, group))
        return 0 if line is None else len(line.waiters)

    def has_line(self, topic: str, group: str) -> bool:
        """Returns whether there is a line to wait in, which pulls for a new waiter if that may find something."""
        return (topic, group) in self._lines

    async def wait(
        self, topic: str, group: str, *, take: Take, timeout_s: float, gone: asyncio.Future[None]
    ) -> PolledMessages | None:
        """Wait in line until `take` returns something; None on timeout, if the client is gone, or the server stops."""
        if self._stopping:
            return None
        loop = asyncio.get_running_loop()
        waiter = _Waiter(take, loop.create_future())
        line = self._join(topic, group, waiter)
        timer = loop.call_later(timeout_s, waiter.leave)
        gone.add_done_callback(waiter.leave)
        try:
            return await waiter.future
        finally:
            waiter.leaving = True
            timer.cancel()
            gone.remove_done_callback(waiter.leave)
            self._leave(topic, group, line, waiter)

    def end_waits(self) -> None:
        """End the waits of now without a result; the next request of each client is checked anew."""
        for line in self._lines.values():
            for waiter in line.waiters:
                waiter.leave()

    def restart(self) -> None:
        """End the waits of now, and let go of what their lines were subscribed to: something else is served."""
        self.end_waits()
        for line in self._lines.values():
            if line.ending is not None:
                line.ending.cancel()
            if line.unsubscribe is not None:
                line.unsubscribe()
        self._lines.clear()

    def stop(self) -> None:
        """End all waits without a result, now and from now on."""
        self._stopping = True
        self.end_waits()
        for (topic, group), line in list(self._lines.items()):
            if not line.waiters:
                self._end(topic, group, line)

    def _join(self, topic: str, group: str, waiter: _Waiter) -> _Line:
        line = self._lines.get((topic, group))
        if line is None:
            line = _Line(asyncio.get_running_loop(), is_common=group == READERS)
            line.unsubscribe = self._subscribe(topic, group, line.signal)  # one that fails leaves no line that sleeps
            self._lines[topic, group] = line
        if line.ending is not None:
            line.ending.cancel()
            line.ending = None
        line.waiters[waiter] = None
        if line.is_common:
            line.newcomers.append(waiter)
        line.serve()
        return line

    def _leave(self, topic: str, group: str, line: _Line, waiter: _Waiter) -> None:
        line.waiters.pop(waiter, None)
        if line.waiters or line.ending is not None:
            return
        if self._stopping or len(self._lines) >= self._idle_max:
            self._end(topic, group, line)
        else:
            line.ending = line.loop.call_later(self._idle_s, self._end, topic, group, line)

    def _end(self, topic: str, group: str, line: _Line) -> None:
        line.ending = None
        if not line.waiters and self._lines.get((topic, group)) is line:
            del self._lines[topic, group]
            if line.unsubscribe is not None:
                line.unsubscribe()


async def _serve_one(line: _Line, waiter: _Waiter) -> bool:
    """Pull for one waiter; returns whether the next one may find something, too."""
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
