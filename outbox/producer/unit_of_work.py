"""UnitOfWork: the messages of one transaction, kept in memory until its commit, by savepoint.

No I/O, no SQLAlchemy events.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from outbox.store.row import OutboxRow
from outbox_core.common.errors import NoTransaction

TOO_LATE: Final = "this transaction is committing or over; publish before the commit, in the transaction's own task"

_moments = itertools.count()


def next_moment() -> int:
    """Returns a logical time: a number greater than all earlier ones in this process."""
    return next(_moments)


class Savepoint(Protocol):
    """An open savepoint: any object, compared by identity."""


class OpenTransaction(Protocol):
    """The driver's transaction that rows were written in."""

    @property
    def is_over(self) -> bool:
        """Returns whether it is committed or rolled back."""

    def when_committed(self, act: Callable[[], None], *, since: int) -> None:
        """Call `act` after its COMMIT, which fails where what was published `since` is lost before."""


class UnitOfWork:
    """The rows of one root transaction of one Outbox. Not thread-safe: for the transaction's own thread or task.

    States: open -> written (the INSERT is done, no more rows can be added) -> closed (committed or rolled back).
    Refers to no Session or Connection, which the driver's transaction would keep alive with it.
    """

    __slots__ = (
        "_doubtful", "_entries", "closed", "failed", "transaction", "withdrawals", "written", "written_at_ms",
        "written_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self._entries: list[tuple[OutboxRow, tuple[Savepoint, ...], int]] = []
        self._doubtful: set[int] = set()
        """When those were published that a rollback to a savepoint took while their Session had changes to flush."""
        self.written: bool = False
        self.written_rows: Sequence[OutboxRow] = ()
        self.withdrawals: Sequence[OutboxRow] = ()
        """The cancels that took a scheduled message out of its table, and are no rows of it themselves."""
        self.failed: BaseException | None = None
        """The first error of a statement that wrote the rows: some of them may be in the tables, so none is written
        again, and the transaction must roll back.
        """
        self.transaction: OpenTransaction | None = None
        self.closed: bool = False
        self.written_at_ms: int = 0

    def add(self, row: OutboxRow, savepoints: tuple[Savepoint, ...]) -> None:
        """Add a row that was published inside these open savepoints (outermost first).

        Raises NoTransaction unless the unit is open.
        """
        if self.closed or self.written:
            raise NoTransaction(TOO_LATE)
        self._entries.append((row, savepoints, next_moment()))

    def discard(self) -> None:
        """Discard all rows: everything that their Session did is rolled back."""
        self._entries = []

    def savepoint_rolled_back(self, savepoint: Savepoint) -> None:
        """Discard the rows that were published inside this savepoint, or in a released one inside it."""
        self._entries = [entry for entry in self._entries if all(enclosing is not savepoint for enclosing in entry[1])]

    def doubt(self, began: int) -> None:
        """Called at a rollback to a savepoint that began at this logical time, while the Session has changes to flush:
        what was published since may be about them, and they will stand.
        """
        self._doubtful |= {moment for *_, moment in self._entries if moment > began}

    def is_doubtful(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Returns whether what these spans took may be about rows that stand."""
        return bool(self._doubtful) and any(
            moment in self._doubtful and _is_within(moment, spans) for *_, moment in self._entries
        )

    def forget(self, spans: Sequence[tuple[int, int]]) -> None:
        """Discard the rows published in these spans of logical time, which were rolled back to a savepoint."""
        if spans:
            self._entries = [entry for entry in self._entries if not _is_within(entry[2], spans)]

    def is_unwritten(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Returns whether a commit now would lose messages, other than those of these spans."""
        if self.written:
            return False
        return self.is_doubtful(spans) or not all(_is_within(moment, spans) for *_, moment in self._entries)

    @property
    def since(self) -> int:
        """Returns the logical time of the first publish."""
        return self._entries[0][2]

    @property
    def rows(self) -> Sequence[OutboxRow]:
        """Returns the rows that a commit now would publish, in order."""
        return [row for row, _, _ in self._entries]

    def mark_written(self, rows: Sequence[OutboxRow], *, withdrawals: Sequence[OutboxRow] = ()) -> None:
        """Record that these rows are in the tables, uncommitted, and that their lease runs."""
        self.written = True
        self.written_rows = rows
        self.withdrawals = withdrawals

    def start_lease(self) -> None:
        """Called just before the INSERT: the lease, which the database counts, ends no sooner than counted from now."""
        self.written_at_ms = time.monotonic_ns() // 1_000_000


def _is_within(moment: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin < moment < end for begin, end in spans)
