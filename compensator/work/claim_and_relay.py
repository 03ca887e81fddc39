"""Batches over one schema's message tables: claim what is due, send it, settle it. No schedule, no loop, no threads.

A batch is filled from as many tables as it takes, so that a thousand tables with a row each are not a thousand batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

from sqlalchemy import Connection, Engine

from compensator.core.batch_totals import PassReport
from compensator.work.batch_size import BatchBytes
from compensator.work.poison_rows import CarefulRelay, Sent
from outbox.delivery.key_waves import PARKED_DELAY_MS, runs
from outbox.delivery.relay import Relay, RelayPolicy
from outbox.store.database import database_errors, retry_conflicts
from outbox.store.message_table import DueRows, MessageStore
from outbox.store.ordering import Barrier
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState
from outbox.store.table_placement import MessageTable
from outbox.telemetry.hooks import NO_TELEMETRY, Telemetry
from outbox.telemetry.ports import SendPath
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.ids import new_token

HELD_ROWS_MAX: Final = 1_000
"""A claim ends once it has put so many rows behind others, though it may have found none to send."""
BEHIND_STEP_US: Final = 100_000
"""What waits for an older message that is put off comes so much later than that at most."""


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
    """Rows that are ours by this token; the table that was claimed from last, and where there may be more. `held` rows
    were due and not claimed: they wait for an older message of their key.
    """

    rows: Sequence[OutboxRow]
    token: str
    last_table: str
    walks_left: Sequence[Walk]
    held: int = 0

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
        """`engine` should come from outbox.store.database.background_engine: READ COMMITTED, a pool of its own.

        `store` is that of any message table of the schema.
        """
        self._engine = engine
        self._store = store
        self._lease_us = options.lease_ms * 1_000
        self._bytes = BatchBytes()
        self._in_hand: dict[str, Mapping[str, Collection[str]]] = {}
        """By token and order key, what is claimed and not settled: what is claimed after it is sent after it, too."""
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
        left, table, held = deque(walks), "", 0
        rows: list[OutboxRow] = []
        # One connection, back in its pool before anything is sent: none is held across the network.
        with database_errors(self._engine.url), self._engine.connect() as connection:
            while left and held < HELD_ROWS_MAX and (asked := self._bytes.rows(rows, rows_max=rows_max)):
                walk = left.popleft()
                table = walk.table
                found, free = self._free(connection, walk, limit=asked, claimed=rows)
                rows += self._claim(connection, walk, free, token=token)
                held += len(found.rows) - len(free)
                if len(found.rows) == asked:  # else it has no more
                    left.appendleft(replace(walk, from_us=found.last_due_us))
        if left and left[0].table == table:
            left.rotate(-1)  # it may have more; the other tables come first
        self._bytes.learn(rows)
        if ids := _ids_by_key(rows):
            self._in_hand[token] = ids
        return Claimed(rows=rows, token=token, last_table=table, walks_left=tuple(left), held=held)

    def send(self, claimed: Claimed, *, accepted: Mapping[str, Collection[str]]) -> Sent:
        """Send claimed rows; `accepted` as in Relay.send. Nothing is written down yet but for rows that failed in an
        unforeseen way. Raises DatabaseUnavailable.
        """
        try:
            return self._relay.send(claimed.rows, token=claimed.token, accepted=accepted)
        except BaseException:
            self._in_hand.pop(claimed.token, None)
            raise

    def settle(self, sent: Sent) -> PassReport:
        """Write down what became of rows. Raises DatabaseUnavailable: then they are sent again when the lease ends."""
        try:
            return self._relay.settle(sent)
        finally:
            self._in_hand.pop(sent.token, None)

    def release(self, claimed: Claimed, *, error: BrokerError | None) -> None:
        """Give rows back that are not going to be sent now; no attempt of theirs. Raises DatabaseUnavailable."""
        self._in_hand.pop(claimed.token, None)
        if claimed.rows:
            self._relay.release(claimed.rows, error, token=claimed.token)

    def _free(
        self, connection: Connection, walk: Walk, *, limit: int, claimed: Sequence[OutboxRow]
    ) -> tuple[DueRows, Sequence[OutboxRow]]:
        """The rows that are due on a walk, and those of them that may be claimed."""
        store = self._store_of(walk)
        with connection.begin():
            due = store.due_rows(connection, limit=limit, from_us=walk.from_us)
        return due, self._without_held(connection, store, due.rows, claimed=claimed)

    def _claim(
        self, connection: Connection, walk: Walk, free: Sequence[OutboxRow], *, token: str
    ) -> Sequence[OutboxRow]:
        """Those of the rows that are ours now.

        They were read whole before they are ours: where all could be claimed, as mostly, that saves reading them again.
        """
        if not free:
            return []
        return retry_conflicts(partial(self._take, connection, self._store_of(walk), free, token=token))

    def _store_of(self, walk: Walk) -> MessageStore:
        return self._store.at(MessageTable(self._store.table.schema, walk.table))

    def _without_held(
        self,
        connection: Connection,
        store: MessageStore,
        due: Sequence[OutboxRow],
        *,
        claimed: Sequence[OutboxRow],
    ) -> Sequence[OutboxRow]:
        """The due rows without those of ordered keys that an older message holds up for certain. They go behind it, by
        one statement for many, and are not claimed: after an outage due times say little of a key's order.

        An older one that somebody has leased may be sent by the time that ours are: those are claimed.
        """
        ordered = runs((row for row in (*claimed, *due) if row.order_key is not None), accepted=self._claimed_before())
        if not ordered:
            return due
        with connection.begin():
            barriers = store.barriers(connection, ordered)
        behind_us = _behind_us(barriers)
        behind: defaultdict[int, list[OutboxRow]] = defaultdict(list)
        for row in due:
            if row.order_key in barriers and _holds(barriers[row.order_key], row):
                behind[behind_us[row.order_key]].append(row)
        for due_at_us, rows in behind.items():
            retry_conflicts(partial(self._put_behind, connection, store, rows, due_at_us=due_at_us))
        held = {row.id for rows in behind.values() for row in rows}
        return [row for row in due if row.id not in held]

    def _claimed_before(self) -> Mapping[str, Collection[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for batch in list(self._in_hand.values()):
            for key, ids in batch.items():
                found[key].update(ids)
        return found

    def _put_behind(
        self, connection: Connection, store: MessageStore, rows: Sequence[OutboxRow], *, due_at_us: int
    ) -> int:
        first_seq = min(row.order_seq or 0 for row in rows)
        with connection.begin():
            return store.put_behind(connection, [row.id for row in rows], due_at_us=due_at_us, first_seq=first_seq)

    def _take(
        self, connection: Connection, store: MessageStore, due: Sequence[OutboxRow], *, token: str
    ) -> Sequence[OutboxRow]:
        ids = [row.id for row in due]
        with connection.begin():
            taken = store.claim(connection, ids, token=token, lease_us=self._lease_us)
            if taken < len(ids):
                return store.claimed(connection, ids, token=token) if taken else []
        return sorted(due, key=lambda row: (row.created_at_us, row.id))


def _holds(barrier: Barrier, row: OutboxRow) -> bool:
    is_at_work = barrier.leased and barrier.state is RowState.PENDING
    return not is_at_work and (row.order_seq or 0) > barrier.order_seq


def _behind_us(barriers: Mapping[str, Barrier]) -> dict[str, int]:
    """By key, the due time that what waits for its older message gets: right behind that. Few different ones, so that
    few statements say them.
    """
    last_due_us = max((one.due_at_us for one in barriers.values() if one.due_in_us <= 0), default=0)
    return {key: _one_behind_us(one, last_due_us=last_due_us) for key, one in barriers.items()}


def _one_behind_us(barrier: Barrier, *, last_due_us: int) -> int:
    if barrier.state is RowState.PARKED:
        return _up(barrier.due_at_us - barrier.due_in_us + PARKED_DELAY_MS * 1_000)
    return last_due_us + 1 if barrier.due_in_us <= 0 else _up(barrier.due_at_us + 1)


def _up(due_at_us: int) -> int:
    return -(-due_at_us // BEHIND_STEP_US) * BEHIND_STEP_US


def _ids_by_key(rows: Sequence[OutboxRow]) -> Mapping[str, Collection[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.order_key is not None:
            found[row.order_key].add(row.id)
    return found
