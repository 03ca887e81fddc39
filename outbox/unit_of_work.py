"""What one transaction wants to publish: kept in memory until its commit, savepoint by savepoint.

No I/O, no SQLAlchemy events.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Final, Protocol

from messaging.errors import NoTransaction
from outbox.row import OutboxRow

TOO_LATE: Final = "this transaction is committing or over; publish before the commit, in the transaction's own task"

_moments = itertools.count()


def next_moment() -> int:
    """A number greater than all given out before in this process: it says what came before what, without a clock."""
    return next(_moments)


class Savepoint(Protocol):
    """What stands for an open savepoint: any object with an identity of its own."""


class UnitOfWork:
    """The rows of one root transaction of one Outbox. Used by the one thread or task that uses the transaction.

    States: open -> written (the INSERT is done, nothing more may be added) -> closed (committed or rolled back).
    """

    __slots__ = ("_entries", "closed", "written", "written_at_ms", "written_rows")

    def __init__(self) -> None:
        self._entries: list[tuple[OutboxRow, tuple[Savepoint, ...], int]] = []
        self.written = False
        self.written_rows: Sequence[OutboxRow] = ()
        self.closed = False
        self.written_at_ms = 0

    def add(self, row: OutboxRow, savepoints: tuple[Savepoint, ...]) -> None:
        """Remember a row, published inside these open savepoints (outermost first).

        Raises NoTransaction when too late.
        """
        if self.closed or self.written:
            raise NoTransaction(TOO_LATE)
        self._entries.append((row, savepoints, next_moment()))

    def savepoint_rolled_back(self, savepoint: Savepoint) -> None:
        """Forget what was published inside this savepoint, or in one inside it that was released."""
        self._entries = [entry for entry in self._entries if all(one is not savepoint for one in entry[1])]

    def forget(self, spans: Sequence[tuple[int, int]]) -> None:
        """Forget what was published in these spans of moments, which the connection rolled back to a savepoint."""
        if spans:
            self._entries = [
                entry for entry in self._entries if not any(begin < entry[2] < end for begin, end in spans)
            ]

    @property
    def rows(self) -> Sequence[OutboxRow]:
        """What the transaction would publish if it committed now, in order."""
        return [row for row, _, _ in self._entries]

    def mark_written(self, rows: Sequence[OutboxRow]) -> None:
        """From now on these rows stand in the tables, uncommitted, and the lease runs."""
        self.written = True
        self.written_rows = rows

    def start_lease(self) -> None:
        """Called just before the INSERT: the lease that the database counts cannot end sooner than counted from
        here.
        """
        self.written_at_ms = time.monotonic_ns() // 1_000_000
