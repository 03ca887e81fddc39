"""What one transaction wants to publish: kept in memory until its commit, savepoint by savepoint.

No I/O, no SQLAlchemy events.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Final, Protocol

from outbox.store.row import OutboxRow
from outbox_core.common.errors import NoTransaction

TOO_LATE: Final = "this transaction is committing or over; publish before the commit, in the transaction's own task"

_moments = itertools.count()


def next_moment() -> int:
    """A number greater than all given out before in this process: it says what came before what, without a clock."""
    return next(_moments)


class Savepoint(Protocol):
    """What stands for an open savepoint: any object with an identity of its own."""


class RootTransaction(Protocol):
    """What stands for the transaction that rows were written in."""

    @property
    def is_active(self) -> bool:
        """Whether it is neither committed nor rolled back."""


class UnitOfWork:
    """The rows of one root transaction of one Outbox. Used by the one thread or task that uses the transaction.

    States: open -> written (the INSERT is done, nothing more may be added) -> closed (committed or rolled back).
    """

    __slots__ = ("_entries", "closed", "transaction", "written", "written_at_ms", "written_rows")

    def __init__(self) -> None:
        self._entries: list[tuple[OutboxRow, tuple[Savepoint, ...], int]] = []
        self.written: bool = False
        self.written_rows: Sequence[OutboxRow] = ()
        self.transaction: RootTransaction | None = None
        self.closed: bool = False
        self.written_at_ms: int = 0

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
            self._entries = [entry for entry in self._entries if not _is_within(entry[2], spans)]

    def is_unwritten(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether a commit now would leave messages behind, beside those of these spans."""
        return not self.written and not all(_is_within(moment, spans) for _, _, moment in self._entries)

    @property
    def rows(self) -> Sequence[OutboxRow]:
        """What the transaction would publish if it committed now, in order."""
        return [row for row, _, _ in self._entries]

    def mark_written(self, rows: Sequence[OutboxRow], *, transaction: RootTransaction | None) -> None:
        """From now on these rows stand in the tables, uncommitted, in this transaction, and the lease runs."""
        self.written = True
        self.written_rows = rows
        self.transaction = transaction

    def start_lease(self) -> None:
        """Called just before the INSERT: the lease that the database counts cannot end sooner than counted from
        here.
        """
        self.written_at_ms = time.monotonic_ns() // 1_000_000


def _is_within(moment: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin < moment < end for begin, end in spans)
