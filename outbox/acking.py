"""The acks of one worker, sent beside its work: while one is on its way the next messages are pulled and handled.

At most one is on its way; who brings the next one waits for it. So a worker holds two batches at most, and its acks
reach the broker in the order in which it handled. Not how an ack is sent, nor tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from outbox.held import Held


class AcksBeside:
    """Used by one worker's thread alone."""

    def __init__(self, ack: Callable[[Sequence[Held]], None], *, pool: Executor) -> None:
        """`ack` acknowledges deliveries of one topic and group, and lets go of them; it is called in the pool."""
        self._ack = ack
        self._pool = pool
        self._on_its_way: Future[None] | None = None

    def put(self, done: Sequence[Held]) -> None:
        """Have these acknowledged. Raises what the acks before these raised, once these are on their way."""
        before = self._on_its_way
        if not done:
            return
        for one in done:
            one.settling = one.acking = True
        try:
            if before is not None:
                before.result()
        finally:
            self._on_its_way = self._pool.submit(self._ack, done)

    def wait(self) -> None:
        """Wait for what is on its way, and raise what it raised."""
        before, self._on_its_way = self._on_its_way, None
        if before is not None:
            before.result()
