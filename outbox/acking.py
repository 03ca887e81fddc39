"""The acks of one worker, sent beside its work: while one is on its way the next messages are pulled and handled.

At most one is on its way; who brings the next one waits for it. So a worker holds two batches at most, and its acks
reach the broker in the order in which it handled. Not how an ack is sent, nor tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from outbox.held import Held


class AcksBeside:
    """Used by one worker's thread alone. Its own starts with the first ack; no process that ends waits for it, as for a
    pool's.
    """

    def __init__(self, ack: Callable[[Sequence[Held]], None], *, name: str) -> None:
        """`ack` acknowledges deliveries of one topic and group, and lets go of them; it is called in thread `name`."""
        self._ack = ack
        self._name = name
        self._brought: SimpleQueue[tuple[Sequence[Held], Future[None]] | None] = SimpleQueue()
        self._on_its_way: Future[None] | None = None
        self._thread: threading.Thread | None = None

    def put(self, done: Sequence[Held]) -> None:
        """Have these acknowledged. Raises what the acks before these raised, once these are on their way."""
        if not done:
            return
        self._start()
        before, told = self._on_its_way, Future[None]()
        for one in done:
            one.settling = one.acking = True
        try:
            if before is not None:
                before.result()
        finally:
            self._on_its_way = told
            self._brought.put((done, told))

    def end(self) -> None:
        """Wait for what is on its way, end the thread, and raise what the ack raised. Idempotent."""
        self._brought.put(None)
        if self._thread is not None:
            self._thread.join()
        before, self._on_its_way = self._on_its_way, None
        if before is not None:
            before.result()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (brought := self._brought.get()) is not None:
            self._send(*brought)
            del brought  # what was acknowledged is not kept until the next ones come

    def _send(self, done: Sequence[Held], told: Future[None]) -> None:
        try:
            self._ack(done)
        except BaseException as error:  # noqa: BLE001  (the worker's thread raises it)
            told.set_exception(error)
        else:
            told.set_result(None)
