"""Writes the entries of one ledger by a handle of BookKeeper's Java client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from outbox_broker.segments.ledgers import LedgerFailed, LedgerFenced


class LedgerOutcomes(Protocol):
    """What a writer needs of the client that created its ledger."""

    def outcome(self, future: Any, action: str) -> LedgerFailed | None:
        """Wait for a future; returns its failure, None if it succeeded."""

    def failure(self, future: Any, action: str) -> LedgerFailed | None:
        """Returns the failure of a future that may not be done yet."""

    def has_room(self) -> bool:
        """Returns whether fewer bytes than the limit are on their way to the bookies."""

    def add_in_flight(self, size_bytes: int) -> None:
        """Count bytes that were sent (or, below zero, were confirmed)."""


class JavaLedgerWriter:
    """The writer of one ledger. A first failure is the handle's last answer: later ones say no more than closed."""

    def __init__(self, client: LedgerOutcomes, handle: Any) -> None:
        """`handle`: of the ledger that was created."""
        self.ledger_id = int(handle.getId())
        self._client = client
        self._handle = handle
        self._guard = threading.Lock()
        self._pending: deque[tuple[Any, int]] = deque()
        self._confirmed = 0
        self._error: LedgerFailed | None = None
        self._released = False

    def append(self, entry: bytes) -> None:
        """Send an entry; see the port."""
        if not self._client.has_room():
            self.confirm(self._confirmed + len(self._pending))
        with self._guard:
            self._refuse()
            self._pending.append((self._handle.appendAsync(entry), len(entry)))
        self._client.add_in_flight(len(entry))

    def confirm(self, count: int) -> None:
        """Wait for acknowledgements; see the port. Entries are acknowledged in order."""
        with self._guard:
            if count <= self._confirmed:
                return
            self._refuse()
            future = self._pending[count - self._confirmed - 1][0]
        # Each call of Java lets another thread have the interpreter: this one is enough where others waited before.
        if self._handle.getLastAddConfirmed() >= count - 1:
            self._settle(count)
            return
        error = self._client.outcome(future, f"append to ledger {self.ledger_id}")
        if error is None:
            self._settle(count)
            return
        with self._guard:
            self._error = self._error or self._first_error(error)
            self._forget_pending()
            raise self._error

    def begin_close(self) -> Callable[[], None]:
        """Begin to close the ledger; see the port."""
        self._end()
        future = self._handle.closeAsync()

        def wait() -> None:
            error = self._client.outcome(future, f"close ledger {self.ledger_id}")
            if error is not None:
                raise error

        return wait

    def release(self) -> None:
        """Release the writer without waiting; see the port. The ledger is closed when the bookies come to it."""
        if self._end():
            self._handle.closeAsync()

    def _end(self) -> bool:
        with self._guard:
            was_released, self._released = self._released, True
            self._forget_pending()
            return not was_released

    def _settle(self, count: int) -> None:
        with self._guard:
            done = 0
            while self._confirmed < count and self._pending:
                done += self._pending.popleft()[1]
                self._confirmed += 1
        self._client.add_in_flight(-done)

    def _first_error(self, error: LedgerFailed) -> LedgerFailed:
        """Returns the error of a fence, if any entry has it; else that of the first entry that failed."""
        failures: list[LedgerFailed] = []
        for future, _ in self._pending:
            if (found := self._client.failure(future, f"append to ledger {self.ledger_id}")) is not None:
                failures.append(found)
        return next((one for one in failures if isinstance(one, LedgerFenced)), failures[0] if failures else error)

    def _forget_pending(self) -> None:
        size_bytes = sum(size for _, size in self._pending)
        self._pending.clear()
        self._client.add_in_flight(-size_bytes)

    def _refuse(self) -> None:
        if self._error is not None:
            raise self._error
        if self._released:
            raise LedgerFailed(f"the writer of ledger {self.ledger_id} is closed")
