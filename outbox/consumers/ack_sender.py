"""The acks of one worker, sent beside its work: while one is on its way the next messages are pulled and handled.

One is on its way at a time, and carries all that was handled until it went: acks reach the broker in the order in which
the worker handled. Where messages come faster than acks are answered, an ack waits a moment for company: each costs a
sync at the broker, which publishes wait for as well. A worker that is ahead of its acks by a batch waits for them; so
it holds two batches at most. Not how an ack is sent, nor tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from outbox.consumers.in_flight import InFlightDelivery

COMPANY_MS: Final = 3
"""An ack that waits for company goes once nothing has come for so long,"""
COMPANY_LOOKS_MAX: Final = 4
"""and after so many looks in any case."""
IDLE_S_MAX: Final = 60.0


class AcksBeside:
    """Used by one worker's thread alone. Its own starts with the first ack; no process that ends waits for it, as for a
    pool's.
    """

    def __init__(
        self,
        ack: Callable[[Sequence[InFlightDelivery]], None],
        *,
        name: str,
        ahead_max: int,
        company_ms: int = COMPANY_MS,
    ) -> None:
        """`ack` acknowledges deliveries of one topic and group, and lets go of them; it is called in thread `name`.

        `ahead_max`: with more than so many unacknowledged put() waits. `company_ms`: an ack that waits for company goes
        once nothing has come for so long.
        """
        self._ack = ack
        self._name = name
        self._ahead_max = ahead_max
        self._company_ms = company_ms
        self._lock = threading.Lock()
        self._brought = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._waiting: list[InFlightDelivery] = []
        self._on_their_way = 0
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, done: Sequence[InFlightDelivery]) -> None:
        """Have these acknowledged. Raises what the acks before these raised, once these are on their way."""
        if not done:
            return
        self._start()
        for one in done:
            one.settling = one.acking = True
        with self._lock:
            if not self._waiting or len(self._waiting) + len(done) >= self._ahead_max:
                self._brought.notify()
            self._waiting += done
            while len(self._waiting) + self._on_their_way > self._ahead_max:
                self._settled.wait(IDLE_S_MAX)
        self._raise()

    def end(self) -> None:
        """Wait for what is on its way, end the thread, and raise what the ack raised. Idempotent."""
        with self._lock:
            self._ended = True
            self._brought.notify()
        if self._thread is not None:
            self._thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        in_company = False
        while taken := self._next(in_company=in_company):
            try:
                self._ack(taken)
            except BaseException as error:  # noqa: BLE001  (the worker's thread raises it)
                self._error = error
            with self._lock:
                self._on_their_way = 0
                self._settled.notify()
                in_company = bool(self._waiting)  # they come faster than acks are answered
            del taken  # what was acknowledged is not kept until the next ones come

    def _next(self, *, in_company: bool) -> list[InFlightDelivery]:
        """What the next ack carries, once there is anything; nothing behind the end."""
        with self._lock:
            while not self._waiting and not self._ended:
                self._brought.wait(IDLE_S_MAX)
            if in_company:
                self._wait_for_company()
            taken, self._waiting = self._waiting[: self._ahead_max], self._waiting[self._ahead_max :]
            self._on_their_way = len(taken)
            return taken

    def _wait_for_company(self) -> None:
        for _ in range(COMPANY_LOOKS_MAX):
            before = len(self._waiting)
            if self._ended or before >= self._ahead_max:
                return
            self._brought.wait(self._company_ms / 1000)
            if len(self._waiting) == before:
                return
