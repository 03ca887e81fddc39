"""Retention: deletes old archive and inbox rows, and order heads of idle keys, in small batches.

Unsent rows are never deleted by age. Every delete names rows by primary key, found by a plain read before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine

from outbox.consumers.inbox_table import InboxStore
from outbox.store.archive_purge import ArchiveStore
from outbox.store.database import database_errors, retry_conflicts
from outbox.store.order_table import OrderStore
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable

T = TypeVar("T")

DAY_US: Final = 24 * 60 * 60 * 1_000_000
BATCH_ROWS: Final = 200
BATCHES_PER_ROUND_MAX: Final = 500
HEAD_SWEEP_EVERY_MS: Final = 60 * 60 * 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How long evidence is kept; None: forever. Inbox rows must be kept longer than their messages may be redelivered.

    If nothing was published for a key of an ordered topic in `order_head_days`, its head is deleted; the key's next
    messages get higher numbers. Evidence that reconciliation has not evaluated yet, by its `judged_file`, is kept for
    up to twice as long.
    """

    archive_days: float | None = None
    inbox_days: float | None = None
    order_head_days: float | None = 7.0
    judged_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResult:
    """How many rows a round deleted; `more`: it ended at its limit, and there is more to delete."""

    archive_rows: int = 0
    inbox_rows: int = 0
    order_heads: int = 0
    more: bool = False

    def __bool__(self) -> bool:
        return bool(self.archive_rows or self.inbox_rows or self.order_heads)


class Retention:
    """Purges one schema. Several may run concurrently: a row that one has deleted is not found by another."""

    def __init__(
        self,
        *,
        engine: Engine,
        archive: ArchiveStore,
        inbox: InboxStore,
        order: OrderStore,
        options: RetentionOptions,
        clock: Clock | None = None,
    ) -> None:
        """`engine` should come from outbox.store.database.background_engine: READ COMMITTED, a pool of its own."""
        self._engine = engine
        self._archive = archive
        self._inbox = inbox
        self._order = order
        self._options = options
        self._clock = clock or SystemClock()
        judged_file = options.judged_file
        self._retention = None if judged_file is None else EvidenceRetention(judged_file, clock=self._clock)
        self._heads_after: str | None = ""
        self._swept_at_ms = self._clock.monotonic_ms()

    def run(self, *, stopping: threading.Event | None = None) -> PurgeResult:
        """Run one round. `stopping` ends it after the current batch. Raises DatabaseUnavailable, SchemaMissing."""
        archive_us = self._age_us(self._options.archive_days, Purgeable.ARCHIVE)
        inbox_us = self._age_us(self._options.inbox_days, Purgeable.INBOX)
        archive_rows, archive_more = self._purge(self._archive.purge, archive_us, stopping)
        inbox_rows, inbox_more = self._purge(self._inbox.purge, inbox_us, stopping)
        heads, heads_more = self._sweep_heads(stopping)
        has_more = archive_more or inbox_more or heads_more
        return PurgeResult(archive_rows=archive_rows, inbox_rows=inbox_rows, order_heads=heads, more=has_more)

    def _age_us(self, days: float | None, evidence: Purgeable) -> int | None:
        """The age from which evidence is deleted; None: never."""
        if days is None or self._retention is None:
            return None if days is None else int(days * DAY_US)
        return self._retention.age_ms(evidence, keep_ms=int(days * DAY_US) // 1000) * 1000

    def _purge(
        self, purge: Callable[..., int], older_than_us: int | None, stopping: threading.Event | None
    ) -> tuple[int, bool]:
        """Returns how many rows were deleted, and whether there are more."""
        if older_than_us is None:
            return 0, False
        total = 0
        for _ in range(BATCHES_PER_ROUND_MAX):
            if stopping is not None and stopping.is_set():
                return total, False
            deleted = self._batch(purge, older_than_us=older_than_us, limit=BATCH_ROWS)
            total += deleted
            if deleted < BATCH_ROWS:
                return total, False
        return total, True

    def _sweep_heads(self, stopping: threading.Event | None) -> tuple[int, bool]:
        """Scans all heads once an hour, in key order; a round continues where the last one ended."""
        days, total = self._options.order_head_days, 0
        if days is None or not self._sweep_is_due():
            return 0, False
        for _ in range(BATCHES_PER_ROUND_MAX):
            if stopping is not None and stopping.is_set():
                return total, False
            deleted, self._heads_after = self._batch(
                self._order.purge_heads, idle_us=int(days * DAY_US), after=self._heads_after or "", limit=BATCH_ROWS
            )
            total += deleted
            if self._heads_after is None:
                return total, False
        return total, True

    def _sweep_is_due(self) -> bool:
        if self._heads_after is not None:
            return True
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._swept_at_ms < HEAD_SWEEP_EVERY_MS:
            return False
        self._heads_after, self._swept_at_ms = "", now_ms
        return True

    def _batch(self, purge: Callable[..., T], **arguments: object) -> T:
        """Run one short transaction, and retry it after a conflict with another one."""

        def transaction() -> T:
            connection: Connection
            with self._engine.begin() as connection:
                return purge(connection, **arguments)

        with database_errors(self._engine.url):
            return retry_conflicts(transaction)
