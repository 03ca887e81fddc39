"""Retention: deletes old archive and inbox rows, a small batch at a time. Nothing unsent is ever deleted by age."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine

from outbox.archive import ArchiveStore
from outbox.database import database_errors
from outbox.inbox import InboxStore

DAY_US: Final = 24 * 60 * 60 * 1_000_000
BATCH_ROWS: Final = 200
BATCHES_PER_ROUND_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How long evidence is kept; None is for ever. An inbox must outlive any redelivery of its messages."""

    archive_days: float | None = None
    inbox_days: float | None = None


class Retention:
    """Purges one database. Many may run beside each other: what one has deleted, another does not find."""

    def __init__(self, *, engine: Engine, archive: ArchiveStore, inbox: InboxStore, options: RetentionOptions) -> None:
        self._engine = engine
        self._archive = archive
        self._inbox = inbox
        self._options = options

    def run(self, *, stopping: threading.Event | None = None) -> tuple[int, int]:
        """One round; returns how many archive and inbox rows went. Raises DatabaseUnavailable."""
        return (
            self._purge(self._archive.purge, self._options.archive_days, stopping),
            self._purge(self._inbox.purge, self._options.inbox_days, stopping),
        )

    def _purge(self, purge: Callable[..., int], days: float | None, stopping: threading.Event | None) -> int:
        if days is None:
            return 0
        total = 0
        for _ in range(BATCHES_PER_ROUND_MAX):
            if stopping is not None and stopping.is_set():
                break
            gone = self._batch(purge, older_than_us=int(days * DAY_US))
            total += gone
            if gone < BATCH_ROWS:
                break
        return total

    def _batch(self, purge: Callable[..., int], *, older_than_us: int) -> int:
        connection: Connection
        with database_errors(self._engine.url), self._engine.begin() as connection:
            return purge(connection, older_than_us=older_than_us, limit=BATCH_ROWS)
