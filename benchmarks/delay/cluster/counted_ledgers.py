"""Ledgers that count what is written to them, by what it is for: log, manifest, or buckets and the id index."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from outbox_broker.schedule.schedule_log import PREFIX
from outbox_broker.segments.ledgers import Ledgers, LedgerWriter, Metadata


class CountedLedgers:
    """Ledgers over others. `counts` has the totals of (kind, what): `ledgers` made, `entries` and `bytes` sent,
    ledgers `deleted` (of all kinds: kind `all`).
    """

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._guard = threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()

    def begin_create(self, metadata: Metadata) -> Callable[[], LedgerWriter]:
        """See the port."""
        segment = metadata["outbox-segment"].decode()
        kind = "log" if segment.startswith(PREFIX) else "manifest" if segment == "manifest" else "buckets"
        self.add(kind, ledgers=1)
        creation = self._ledgers.begin_create(metadata)
        return lambda: _CountedWriter(creation(), self, kind)

    def recover(self, ledger_ids: Sequence[int]) -> list[int]:
        """See the port."""
        return self._ledgers.recover(ledger_ids)

    def confirmed(self, ledger_id: int) -> int:
        """See the port."""
        return self._ledgers.confirmed(ledger_id)

    def read(self, ledger_id: int, first: int, last: int) -> list[bytes]:
        """See the port."""
        return self._ledgers.read(ledger_id, first, last)

    def length_bytes(self, ledger_id: int, last: int) -> int:
        """See the port."""
        return self._ledgers.length_bytes(ledger_id, last)

    def delete(self, ledger_ids: Sequence[int]) -> None:
        """See the port."""
        self.add("all", deleted=len(ledger_ids))
        self._ledgers.delete(ledger_ids)

    def find(self) -> Iterator[tuple[int, Metadata]]:
        """See the port."""
        return self._ledgers.find()

    def add(self, kind: str, **numbers: int) -> None:
        """Count. Thread-safe."""
        with self._guard:
            for what, number in numbers.items():
                self.counts[kind, what] += number


class _CountedWriter:
    """A LedgerWriter."""

    def __init__(self, writer: LedgerWriter, counted: CountedLedgers, kind: str) -> None:
        self._writer = writer
        self._counted = counted
        self._kind = kind

    @property
    def ledger_id(self) -> int:
        return self._writer.ledger_id

    def append(self, entry: bytes) -> None:
        self._counted.add(self._kind, entries=1, bytes=len(entry))
        self._writer.append(entry)

    def confirm(self, count: int) -> None:
        self._writer.confirm(count)

    def begin_close(self) -> Callable[[], None]:
        return self._writer.begin_close()

    def release(self) -> None:
        self._writer.release()
