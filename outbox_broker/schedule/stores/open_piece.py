"""The end of a segment that is appended to: a ledger with this process's writer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from outbox_broker.schedule.stores.ledger_manifest import LedgerPiece
from outbox_broker.schedule.stores.ledger_records import FILLER, entries_of
from outbox_broker.schedule.stores.ledgers import LedgerWriter


@dataclass(slots=True, eq=False)
class OpenPiece:
    """A piece that this store appends to. `end` is the position behind its last record, `sent` counts all entries.

    `lock` guards all fields: a sync in one thread may add a filler while another thread appends.
    """

    piece: LedgerPiece
    writer: LedgerWriter
    end: int
    sent: int = 0
    confirmed: int = 0
    known: int = 0  # entries that the bookies know to be confirmed: it travels with the entries after them
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, records: Sequence[bytes]) -> list[int]:
        """Send records; returns where each begins, and the end. Under `lock`. Raises LedgerFailed."""
        positions: list[int] = []
        for record in records:
            positions.append(self.piece.begin + self.sent)
            for entry in entries_of(record):
                self._send(entry)
        self.end = self.piece.begin + self.sent
        return [*positions, self.end]

    def confirm(self) -> None:
        """Return once all that was sent is durable. Raises LedgerFailed.

        A recovery writes each entry anew that the bookies do not know to be confirmed. Behind entries that were sent
        together, one more entry makes that known, so that a takeover is short; nothing waits for it.
        """
        with self.lock:
            wanted = self.sent
        if self.is_closed or wanted <= self.confirmed:
            return
        self.writer.confirm(wanted)
        with self.lock:
            self.confirmed = max(self.confirmed, wanted)
            if self.confirmed == self.sent and self.sent - self.known > 1 and not self.is_closed:
                self._send(FILLER)

    def close(self) -> int | None:
        """Close the ledger behind its last entry; returns the number of entries. Raises LedgerFailed."""
        with self.lock:
            if self.is_closed:
                return None
            self.writer.confirm(self.sent)
            self.writer.close()
            self.is_closed = True
            return self.sent

    def _send(self, entry: bytes) -> None:
        self.known = self.confirmed
        self.writer.append(entry)
        self.sent += 1
