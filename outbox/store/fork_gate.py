"""ForkGate: delays forks briefly, until no background transaction of this process is open.

A child that is forked during a SQLite transaction inherits the library's record of its lock, but not the thread that
would release it: each write of the child then fails with "database is locked". A fork in C cannot be delayed: the gate
is open in its child, which on SQLite has to be forked while nothing is being sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outbox_core.runtime.process_fork import reset_in_children

FORK_WAIT_SECONDS_MAX: Final = 2.0


class ForkGate:
    """Counts open background transactions, and delays forks until there are none.

    Thread-safe. A fork waits for `wait_seconds_max` at most: a transaction that waits for a lock of the forking thread
    itself would never end.
    """

    def __init__(self, *, wait_seconds_max: float = FORK_WAIT_SECONDS_MAX) -> None:
        self._wait_seconds_max = wait_seconds_max
        self._changed = threading.Condition(threading.Lock())
        self._open = 0
        self._forking = 0

    def register(self) -> None:
        """Install the gate for all forks of this process; the hook cannot be removed."""
        os.register_at_fork(before=self.close, after_in_parent=self.reopen)
        reset_in_children(self)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Delay forks until the block ends. The block begins when no fork is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, self._wait_seconds_max)
            self._open += 1
        try:
            yield
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Block new transactions, and wait until the open ones have ended."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._open, self._wait_seconds_max)

    def reopen(self) -> None:
        """Allow transactions again, in the parent."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def reset_after_fork(self) -> None:
        """Reset the gate in the child, which has none of its parent's threads."""
        self._changed = threading.Condition(threading.Lock())
        self._open = 0
        self._forking = 0


fork_gate: Final = ForkGate()
