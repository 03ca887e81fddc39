"""The end of a segment that is appended to: a ledger with this process's writer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outbox_broker.segments.ledger_manifest import LedgerPiece
from outbox_broker.segments.ledger_records import FILLER, entries_of
from outbox_broker.segments.ledgers import LedgerWriter
from outbox_broker.segments.manifest_log import ManifestPlace

_REWRITTEN_ENTRIES_MAX: Final = 16
_REWRITTEN_BYTES_MAX: Final = 16 * 1024
"""What a recovery may have to write anew of a ledger to which nothing more is appended. Behind each two entries, a
million messages on 64 shards made 167,000 entries of logs, where 129,000 do."""


@dataclass(slots=True, eq=False)
class OpenPiece:
    """A piece that this store appends to. `end` is the position behind its last record, `sent` counts all entries.

    `lock` guards all fields: a sync in one thread may add a filler while another thread appends.
    """

    piece: LedgerPiece
    writer: LedgerWriter
    end: int
    named_at: ManifestPlace | None  # the change of the manifest that names it; None once that is confirmed
    sent: int = 0
    confirmed: int = 0
    known: int = 0  # entries that the bookies know to be confirmed: it travels with the entries after them
    sent_bytes: int = 0
    confirmed_bytes: int = 0
    known_bytes: int = 0
    uses: int = 0  # how many appends
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
        self.uses += 1
        return [*positions, self.end]

    def confirm(self) -> None:
        """Return once all that was sent is durable. Raises LedgerFailed.

        A recovery writes each entry anew that the bookies do not know to be confirmed. Behind many or large entries
        that were sent together, one more entry makes that known, so that a takeover is short; nothing waits for it.
        """
        with self.lock:
            wanted, wanted_bytes = self.sent, self.sent_bytes
        if self.is_closed or wanted <= self.confirmed:
            return
        self.writer.confirm(wanted)
        with self.lock:
            self.confirmed = max(self.confirmed, wanted)
            self.confirmed_bytes = max(self.confirmed_bytes, wanted_bytes)
            if self.confirmed == self.sent and self._is_long_to_recover() and not self.is_closed:
                self._send(FILLER)

    def begin_close(self) -> Callable[[], None] | None:
        """Begin to close the ledger behind its last entry, once all are confirmed; returns what waits for the end, and
        raises LedgerFailed. None if that was begun before. Raises LedgerFailed.
        """
        with self.lock:
            if self.is_closed:
                return None
            self.writer.confirm(self.sent)
            self.confirmed, self.is_closed = self.sent, True
            return self.writer.begin_close()

    def _is_long_to_recover(self) -> bool:
        entries, size_bytes = self.sent - self.known, self.sent_bytes - self.known_bytes
        return entries > _REWRITTEN_ENTRIES_MAX or (entries > 1 and size_bytes > _REWRITTEN_BYTES_MAX)

    def _send(self, entry: bytes) -> None:
        self.known, self.known_bytes = self.confirmed, self.confirmed_bytes
        self.writer.append(entry)
        self.sent += 1
        self.sent_bytes += len(entry)
