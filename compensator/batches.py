"""Batches over one schema's message tables: claim what is due, send it, settle it. No schedule, no loop, no threads.

A batch is filled from as many tables as it takes, so that a thousand tables with a row each are not a thousand batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from sqlalchemy import Connection, Engine

from compensator.batch_bytes import BatchBytes
from compensator.defects import CarefulRelay, Sent
from compensator.reports import PassReport
from messaging.broker import Broker
from messaging.errors import BrokerError
from messaging.ids import new_token
from outbox.database import database_errors, retry_conflicts
from outbox.placement import MessageTable
from outbox.relay import Relay, RelayPolicy
from outbox.row import OutboxRow
from outbox.store import Backlog, DueRows, MessageStore
from outbox.telemetry.hooks import NO_TELEMETRY, SendPath, Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """How much is claimed at once, and for how long a claim holds."""

    batch_rows: int = 200
    lease_ms: int = 60_000


@dataclass(frozen=True, slots=True)
class Walk:
    """A message table, and the due time from which on there may be rows to claim: nothing is left before it."""

    table: str
    from_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Rows that are ours by this token; the table that was claimed from last, and where there may be more."""

    rows: Sequence[OutboxRow]
    token: str
    last_table: str
    walks_left: Sequence[Walk]

    @property
    def topics(self) -> Counter[str]:
        """How many rows there are of each topic."""
        return Counter(row.topic for row in self.rows)


class Batches:
    """The steps of one source's batches. Safe in any thread.

    Any number of these may run beside each other: a row belongs to whose claim came first.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: MessageStore,
        broker: Broker,
        policy: RelayPolicy,
        options: ScanOptions,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        """`engine` should come from outbox.database.background_engine: READ COMMITTED, a pool of its own.

        `store` is that of any message table of the schema.
        """
        self._engine = engine
        self._store = store
        self._lease_us = options.lease_ms * 1_000
        self._bytes = BatchBytes()
        random = Random()
        relay = Relay(
            engine=engine,
            store=store,
            broker=broker,
            policy=policy,
            random=random,
            telemetry=telemetry,
            path=SendPath.COMPENSATOR,
        )
        self._relay = CarefulRelay(relay, engine=engine, store=store, policy=policy, random=random)

    def claim(self, walks: Sequence[Walk], *, rows_max: int) -> Claimed:
        """Claim up to `rows_max` due rows along these walks, the first table's first; fewer where bodies are large.

        Raises DatabaseUnavailable, SchemaMissing. What was claimed by then comes back when its lease ends.
        """
        token = new_token()
        left, table = deque(walks), ""
        rows: list[OutboxRow] = []
        # One connection, back in its pool before anything is sent: none is held across the network.
        with database_errors(self._engine.url), self._engine.connect() as connection:
            while left and (asked := self._bytes.rows(rows, rows_max=rows_max)):
                walk = left.popleft()
                table = walk.table
                found, claimed = self._claim(connection, walk, token=token, limit=asked)
                rows += claimed
                if len(found.rows) == asked:  # else it has no more
                    left.appendleft(replace(walk, from_us=found.last_due_us))
        if left and left[0].table == table:
            left.rotate(-1)  # it may have more; the other tables come first
        self._bytes.learn(rows)
        return Claimed(rows=rows, token=token, last_table=table, walks_left=tuple(left))

    def send(self, claimed: Claimed, *, accepted: Mapping[str, Collection[str]]) -> Sent:
        """Send claimed rows; `accepted` as in Relay.send. Nothing is written down yet but for rows that failed in an
        unforeseen way. Raises DatabaseUnavailable.
        """
        return self._relay.send(claimed.rows, token=claimed.token, accepted=accepted)

    def settle(self, sent: Sent) -> PassReport:
        """Write down what became of rows. Raises DatabaseUnavailable: then they are sent again when the lease ends."""
        return self._relay.settle(sent)

    def release(self, claimed: Claimed, *, error: BrokerError | None) -> None:
        """Give rows back that are not going to be sent now; no attempt of theirs. Raises DatabaseUnavailable."""
        if claimed.rows:
            self._relay.release(claimed.rows, error, token=claimed.token)

    def backlog(self) -> Backlog:
        """How the store's own table stands. Raises DatabaseUnavailable, SchemaMissing."""
        with database_errors(self._engine.url), self._engine.connect() as connection:
            return self._store.backlog(connection)

    def _claim(
        self, connection: Connection, walk: Walk, *, token: str, limit: int
    ) -> tuple[DueRows, Sequence[OutboxRow]]:
        """The rows that were due on a walk, and those of them that are ours now.

        They are read whole before they are ours: where all could be claimed, as mostly, that saves reading them again.
        """
        store = self._store.at(MessageTable(self._store.table.schema, walk.table))
        with connection.begin():
            due = store.due_rows(connection, limit=limit, from_us=walk.from_us)
        if not due.rows:
            return due, []
        return due, retry_conflicts(partial(self._take, connection, store, due.rows, token=token))

    def _take(
        self, connection: Connection, store: MessageStore, due: Sequence[OutboxRow], *, token: str
    ) -> Sequence[OutboxRow]:
        ids = [row.id for row in due]
        with connection.begin():
            taken = store.claim(connection, ids, token=token, lease_us=self._lease_us)
            if taken < len(ids):
                return store.claimed(connection, ids, token=token) if taken else []
        return sorted(due, key=lambda row: (row.created_at_us, row.id))
