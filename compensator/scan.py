"""One pass over one message table: claim what is due, deliver it, go on while batches are full.

No schedule, no threads.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from random import Random
from typing import Final

from sqlalchemy import Engine

from messaging.broker import Broker
from messaging.errors import BrokerError
from messaging.ids import new_token
from outbox.database import database_errors
from outbox.relay import Relay, RelayPolicy
from outbox.row import OutboxRow
from outbox.store import Backlog, MessageStore

logger = logging.getLogger(__name__)

BATCHES_PER_PASS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """How much a pass takes at once, and for how long a claim holds."""

    batch_rows: int = 200
    lease_ms: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass came to; `outage` carries the broker's error that ended it early."""

    batches: int = 0
    claimed: int = 0
    accepted: int = 0
    retried: int = 0
    parked: int = 0
    stale: int = 0
    outage: BrokerError | None = None


class Scan:
    """Passes over one source.

    Any number of these may run beside each other: a row belongs to whose claim came first.
    """

    def __init__(
        self, *, engine: Engine, store: MessageStore, broker: Broker, policy: RelayPolicy, options: ScanOptions
    ) -> None:
        """`engine` should come from outbox.database.background_engine: READ COMMITTED, a pool of its own."""
        self._engine = engine
        self._store = store
        self._options = options
        self._relay = Relay(engine=engine, store=store, broker=broker, policy=policy, random=Random())

    def run(self, *, stopping: threading.Event | None = None) -> PassReport:
        """One pass, until nothing is due, the broker is out, or `stopping` is set. Raises DatabaseUnavailable."""
        totals = dict.fromkeys(("batches", "claimed", "accepted", "retried", "parked", "stale"), 0)
        outage: BrokerError | None = None
        for _ in range(BATCHES_PER_PASS_MAX):
            if stopping is not None and stopping.is_set():
                break
            found, rows, token = self._claim()
            if rows:
                report = self._relay.deliver(rows, token=token)
                totals["batches"] += 1
                totals["claimed"] += len(rows)
                for name in ("accepted", "retried", "parked", "stale"):
                    totals[name] += getattr(report, name)
                outage = report.outage
            # After an outage the rest of the backlog stays as it is: no attempt is burnt on it.
            if outage is not None or found < self._options.batch_rows:
                break
        return PassReport(**totals, outage=outage)

    def backlog(self) -> Backlog:
        """How the table stands. Raises DatabaseUnavailable, SchemaMissing."""
        with database_errors(self._engine.url), self._engine.connect() as connection:
            return self._store.backlog(connection)

    def _claim(self) -> tuple[int, list[OutboxRow], str]:
        """How many ids were due, the rows that we got of them, and the token that they are ours by."""
        token = new_token()
        with database_errors(self._engine.url):
            with self._engine.begin() as connection:
                ids = self._store.due_ids(connection, limit=self._options.batch_rows)
            if not ids:
                return 0, [], token
            with self._engine.begin() as connection:
                self._store.claim(connection, ids, token=token, lease_us=self._options.lease_ms * 1000)
            with self._engine.begin() as connection:
                return len(ids), self._store.claimed(connection, ids, token=token), token
