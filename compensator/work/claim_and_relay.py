"""Claims batches of due rows of one schema's message tables, sends and settles them. No schedule, loop or threads.

A batch is filled from as many tables as needed, so that a thousand tables with a row each do not make as many batches;
and with as many rows as their bodies leave room for, which is estimated from those that were read. Rows are claimed as
they fall due by the tables' index, or because their timers were taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final

import msgspec
from sqlalchemy import Connection, Engine

from compensator.core.batch_totals import BatchTotals, add
from compensator.work.poison_row_isolation import IsolatingRelay, SentBatch
from outbox.delivery.relay import PARKED_DELAY_MS, Relay, RelayPolicy, runs
from outbox.store.database import database_errors, retry_conflicts
from outbox.store.message_table import ERROR_CHARS_MAX, DueRows, MessageStore
from outbox.store.order_table import Barrier
from outbox.store.pending_due_times import PendingDueTimes
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState
from outbox.store.table_placement import MessageTable
from outbox.telemetry.ports import SendPath
from outbox.telemetry.telemetry import NO_TELEMETRY, Telemetry
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.delivery_decision import Retry
from outbox_core.messages.ids import new_token
from outbox_core.messages.timing_port import TimedRow
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LogInterval

logger: EventLogger = EventLogger(__name__)

HELD_ROWS_MAX: Final = 1_000
"""A claim ends once it has postponed so many rows behind older ones, even if it has found none to send."""
BEHIND_STEP_US: Final = 100_000
"""A row that waits for a postponed older message becomes due at most so much later than that message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOptions:
    """How many rows are claimed at once, and how long their lease is."""

    batch_rows: int = 200
    lease_ms: int = 60_000


@dataclass(frozen=True, slots=True)
class TableScan:
    """A message table, and the due time from which it is scanned: no rows remain to be claimed before it."""

    table: str
    from_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """Rows leased by this token until `until_ms` of the monotonic clock; the table that was claimed from last, and
    where there may be more. `held` rows were due and not claimed: they wait for an older message of their key.
    """

    rows: Sequence[OutboxRow]
    token: str
    until_ms: int
    last_table: str
    scans_left: Sequence[TableScan]
    held: int = 0

    @property
    def topics(self) -> Counter[str]:
        """The number of rows of each topic."""
        return Counter(row.topic for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTimers:
    """Rows whose timers were taken: those that were claimed, which may be sent from `due_at_ms` of the monotonic clock
    on; and in how many milliseconds others are due.
    """

    batch: ClaimedBatch
    later_ms: Mapping[TimedRow, int]
    due_at_ms: int


class Batches:
    """The steps of one source's batches. Safe in any thread.

    Any number of these may run concurrently: a row belongs to the first claim.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: MessageStore,
        broker: Broker,
        policy: RelayPolicy,
        options: ClaimOptions,
        source: str,
        telemetry: Telemetry = NO_TELEMETRY,
        clock: Clock | None = None,
    ) -> None:
        """`engine` should come from outbox.store.database.background_engine: READ COMMITTED, a pool of its own.

        `store` is that of any message table of the schema; `source` is the source's name in logs.
        """
        self._engine = engine
        self._store = store
        self._lease_us = options.lease_ms * 1_000
        self._clock = clock or SystemClock()
        self._bytes = BatchBytes()
        self._retries = RetryLog(source, clock=self._clock)
        self._in_hand: dict[str, Mapping[str, Collection[str]]] = {}
        """By token and order key, rows claimed and not settled. Batches are sent in the order of their claims."""
        self._unsettled: deque[SentBatch] = deque()
        """Batches that the broker has answered and the database refused to settle."""
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
        self._relay = IsolatingRelay(relay, engine=engine, store=store, policy=policy, random=random)

    def claim(self, scans: Sequence[TableScan], *, rows_max: int) -> ClaimedBatch:
        """Claim up to `rows_max` due rows of these tables, the first table's first; fewer if bodies are large.

        Raises DatabaseUnavailable, SchemaMissing. Rows claimed by then become due again when their lease ends.
        """
        token, until_ms = new_token(), self._lease_ends_ms()
        scans_left, table, held = deque(scans), "", 0
        rows: list[OutboxRow] = []
        # One connection, returned to its pool before anything is sent: none is held during network I/O.
        with database_errors(self._engine.url), self._engine.connect() as connection:
            while scans_left and held < HELD_ROWS_MAX and (limit := self._bytes.rows(rows, rows_max=rows_max)):
                scan = scans_left.popleft()
                table = scan.table
                due, free = self._free(connection, scan, limit=limit, claimed=rows)
                rows += self._claim(connection, scan, free, token=token)
                held += len(due.rows) - len(free)
                if len(due.rows) == limit:  # else it has no more
                    scans_left.appendleft(replace(scan, from_us=due.last_due_us))
        if scans_left and scans_left[0].table == table:
            scans_left.rotate(-1)  # the table may have more; the other tables come first
        self._bytes.learn(rows)
        if ids := _ids_by_key(rows):
            self._in_hand[token] = ids
        return ClaimedBatch(
            rows=rows, token=token, until_ms=until_ms, last_table=table, scans_left=tuple(scans_left), held=held
        )

    def room(self, rows_max: int) -> int:
        """How many rows to claim by their ids, so that their bodies stay within the limit of a batch."""
        return self._bytes.rows((), rows_max=rows_max)

    def claim_timed(self, timed: Sequence[TimedRow], *, ahead_ms: int, clock: Clock) -> ClaimedTimers:
        """Claim those of these rows that are due, or will be within `ahead_ms`.

        Raises DatabaseUnavailable, SchemaMissing.
        """
        token, until_ms = new_token(), self._lease_ends_ms()
        rows: list[OutboxRow] = []
        later: dict[TimedRow, int] = {}
        due_at_ms = 0
        by_table: defaultdict[str, list[TimedRow]] = defaultdict(list)
        for row in timed:
            by_table[row.table].append(row)
        with database_errors(self._engine.url), self._engine.connect() as connection:
            for table, table_rows in by_table.items():
                message_table = MessageTable(self._store.table.schema, table)
                claim = partial(self._take_timed, connection, message_table, table_rows, ahead_ms=ahead_ms, clock=clock)
                claimed_rows, later_in_table, table_due_at_ms = retry_conflicts(partial(claim, token=token))
                rows += claimed_rows
                later |= later_in_table
                due_at_ms = max(due_at_ms, table_due_at_ms)
        self._bytes.learn(rows)
        batch = ClaimedBatch(rows=rows, token=token, until_ms=until_ms, last_table="", scans_left=())
        return ClaimedTimers(batch=batch, later_ms=later, due_at_ms=due_at_ms)

    def send(self, claimed: ClaimedBatch, *, accepted: Mapping[str, Collection[str]]) -> SentBatch:
        """Send claimed rows while their lease lasts; `accepted` as in Relay.send. Writes no results yet, except for
        rows that failed with an unforeseen error. Raises DatabaseUnavailable.
        """

        def in_time() -> bool:
            return self._clock.monotonic_ms() < claimed.until_ms

        try:
            return self._relay.send(claimed.rows, token=claimed.token, accepted=accepted, in_time=in_time)
        except BaseException:
            self._in_hand.pop(claimed.token, None)
            raise

    def settle(self, sent: SentBatch) -> BatchTotals:
        """Write the results of rows. Raises DatabaseUnavailable, SchemaMissing, ConfigurationError: then call
        settle_again(), or they are sent again when the lease ends.
        """
        self._retries.write(sent)
        try:
            return self._settle(sent)
        finally:
            self._in_hand.pop(sent.token, None)

    @property
    def unsettled_batches(self) -> int:
        """Returns how many batches settle_again() would settle."""
        return len(self._unsettled)

    def settle_again(self) -> BatchTotals:
        """Write the results that could not be written before, of batches whose lease lasts. Raises as settle() does."""
        total = BatchTotals()
        for _ in range(len(self._unsettled)):
            try:
                sent = self._unsettled.popleft()
            except IndexError:  # another thread was faster
                break
            if sent.in_time():
                total = add(total, self._settle(sent))
            else:
                logger.warning("settlements_given_up", extra={"rows": len(sent.unsettled or ())})
        return replace(total, outage=None)  # not one of today: the broker answered these batches in an earlier turn

    def _settle(self, sent: SentBatch) -> BatchTotals:
        settled = self._relay.settle(sent)
        if settled.error is not None:
            self._unsettled.append(settled)
            raise settled.error
        return settled.answer

    def release(self, claimed: ClaimedBatch, *, error: BrokerError | None) -> None:
        """Release rows that will not be sent now, without using up an attempt. Raises DatabaseUnavailable."""
        self._in_hand.pop(claimed.token, None)
        if claimed.rows:
            self._relay.release(claimed.rows, error, token=claimed.token)

    def _lease_ends_ms(self) -> int:
        """Returns when a lease ends that begins now, by the monotonic clock: no later than by the database's."""
        return self._clock.monotonic_ms() + self._lease_us // 1_000

    def _free(
        self, connection: Connection, scan: TableScan, *, limit: int, claimed: Sequence[OutboxRow]
    ) -> tuple[DueRows, Sequence[OutboxRow]]:
        """Returns the due rows of a table, and those of them that may be claimed."""
        store = self._store_of(scan)
        with connection.begin():
            due = store.due_rows(connection, limit=limit, from_us=scan.from_us)
        return due, self._without_held(connection, store, due.rows, claimed=claimed)

    def _claim(
        self, connection: Connection, scan: TableScan, free: Sequence[OutboxRow], *, token: str
    ) -> Sequence[OutboxRow]:
        """Claim rows; returns those that were claimed.

        They were read with their bodies before the claim: if all were claimed, as is usual, they are not read again.
        """
        if not free:
            return []
        return retry_conflicts(partial(self._take, connection, self._store_of(scan), free, token=token))

    def _store_of(self, scan: TableScan) -> MessageStore:
        return self._store.at(MessageTable(self._store.table.schema, scan.table))

    def _without_held(
        self,
        connection: Connection,
        store: MessageStore,
        due: Sequence[OutboxRow],
        *,
        claimed: Sequence[OutboxRow],
    ) -> Sequence[OutboxRow]:
        """Returns the due rows without those of ordered keys that must wait for an older message. Those are postponed
        behind it, many by one statement, and not claimed: after an outage, due times do not follow a key's order. Rows
        that were claimed and given back cost 8 to 39 claims each. Due times only grow, as the low-water mark requires.

        An older message that is leased may have been sent by the time these are: rows behind it are claimed.
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
        held_ids = {row.id for rows in behind.values() for row in rows}
        return [row for row in due if row.id not in held_ids]

    def _claimed_before(self) -> Mapping[str, Collection[str]]:
        ids_by_key: defaultdict[str, set[str]] = defaultdict(set)
        for batch in list(self._in_hand.values()):
            for key, ids in batch.items():
                ids_by_key[key].update(ids)
        return ids_by_key

    def _put_behind(
        self, connection: Connection, store: MessageStore, rows: Sequence[OutboxRow], *, due_at_us: int
    ) -> int:
        first_seq = min(row.order_seq or 0 for row in rows)
        with connection.begin():
            return store.postpone(connection, [row.id for row in rows], due_at_us=due_at_us, first_seq=first_seq)

    def _take(
        self, connection: Connection, store: MessageStore, due: Sequence[OutboxRow], *, token: str
    ) -> Sequence[OutboxRow]:
        ids = [row.id for row in due]
        with connection.begin():
            claimed_count = store.claim(connection, ids, token=token, lease_us=self._lease_us)
            if claimed_count < len(ids):
                return store.claimed(connection, ids, token=token) if claimed_count else []
        return sorted(due, key=lambda row: (row.created_at_us, row.id))

    def _take_timed(
        self,
        connection: Connection,
        table: MessageTable,
        timed: Sequence[TimedRow],
        *,
        token: str,
        ahead_ms: int,
        clock: Clock,
    ) -> tuple[Sequence[OutboxRow], Mapping[TimedRow, int], int]:
        """Bodies are read after the claim: of rows that another owner has, none is read."""
        store, ids = self._store.at(table), [row.id for row in timed]
        with connection.begin():
            count = store.claim(connection, ids, token=token, lease_us=self._lease_us, ahead_us=ahead_ms * 1_000)
            claimed = store.claimed(connection, ids, token=token) if count else []
            # The clock is read behind the query, so that what is left of the time is never taken for shorter.
            rows, due_in_ms = due_soon(claimed, ahead_ms=ahead_ms)
            due_at_ms = clock.monotonic_ms() + due_in_ms
            not_claimed = unclaimed(timed, claimed={row.id for row in rows})
            reads = PendingDueTimes(dialect=connection.dialect, table=table)
            due_in_us = reads.due_in_us(connection, [row.id for row in not_claimed]) if not_claimed else {}
        return rows, later_ms(not_claimed, due_in_us=due_in_us), due_at_ms


def _holds(barrier: Barrier, row: OutboxRow) -> bool:
    is_at_work = barrier.leased and barrier.state is RowState.PENDING
    return not is_at_work and (row.order_seq or 0) > barrier.order_seq


def _behind_us(barriers: Mapping[str, Barrier]) -> dict[str, int]:
    """By key, the new due time of rows that wait for an older message: right behind it. Few distinct times, so that few
    statements are needed.
    """
    last_due_us = max((barrier.due_at_us for barrier in barriers.values() if barrier.due_in_us <= 0), default=0)
    return {key: _behind_barrier_us(barrier, last_due_us=last_due_us) for key, barrier in barriers.items()}


def _behind_barrier_us(barrier: Barrier, *, last_due_us: int) -> int:
    if barrier.state is not RowState.PENDING:
        return _up(barrier.due_at_us - barrier.due_in_us + PARKED_DELAY_MS * 1_000)
    return last_due_us + 1 if barrier.due_in_us <= 0 else _up(barrier.due_at_us + 1)


def _up(due_at_us: int) -> int:
    return -(-due_at_us // BEHIND_STEP_US) * BEHIND_STEP_US


def _ids_by_key(rows: Sequence[OutboxRow]) -> Mapping[str, Collection[str]]:
    ids_by_key: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.order_key is not None:
            ids_by_key[row.order_key].add(row.id)
    return ids_by_key


_MS_US: Final = 1_000

# -- what becomes of timers that were taken: no timing store, no database ---------------------------------------------
# A timer is a hint about a row, which alone says what is true. A row that was claimed is sent, one that is gone (sent,
# withdrawn, parked) needs no timer, and one that is due later keeps its timer, at the row's time. So a timer that was
# lost, repeated, early or late costs a statement, and a row is sent by whom claimed it (decision 102).


def unclaimed(rows: Sequence[TimedRow], *, claimed: Collection[str]) -> list[TimedRow]:
    """Returns the rows of which the table must say why they could not be claimed."""
    return [row for row in rows if row.id not in claimed]


def due_soon(rows: Sequence[OutboxRow], *, ahead_ms: int) -> tuple[list[OutboxRow], int]:
    """Returns claimed rows as they are once all of those are due that will be within `ahead_ms`, and in how many
    milliseconds that is. One that is due later than that stays as it is: whoever sends it puts it back.
    """
    waiting_us = [row.deliver_in_us or 0 for row in rows]
    soon_us = [us for us in waiting_us if 0 < us <= ahead_ms * _MS_US]
    ready = [
        msgspec.structs.replace(row, deliver_in_us=0) if 0 < us <= ahead_ms * _MS_US else row
        for row, us in zip(rows, waiting_us, strict=True)
    ]
    return ready, -(-max(soon_us, default=0) // _MS_US)


def later_ms(rows: Sequence[TimedRow], *, due_in_us: Mapping[str, int]) -> dict[TimedRow, int]:
    """Returns in how many milliseconds the timers of unclaimed rows are due again; those that are left out are removed.

    `due_in_us`: of those of them that are pending. They are due later: their time was moved, another owner has them, or
    the store's clock is ahead of the database's. The new times are relative, so that two clocks need not agree.
    """
    return {row: max(1, -(-due_in_us[row.id] // _MS_US)) for row in rows if row.id in due_in_us}


# -- how many rows of unknown size to read at once --------------------------------------------------------------------

BATCH_BYTES_MAX: Final = 32 * 1024 * 1024
"""Limit of the bodies of one batch; a single row's body may have half of that."""
FIRST_ROWS: Final = 32
"""Rows that are read first, before their size is known."""


class BatchBytes:
    """Estimates the size of a source's bodies from the rows that were read."""

    def __init__(self, *, bytes_max: int = BATCH_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._row_bytes: float | None = None

    def rows(self, so_far: Sequence[OutboxRow], *, rows_max: int) -> int:
        """How many more rows to read into a batch that has `so_far`; 0: it is full."""
        room = rows_max - len(so_far)
        if not so_far:
            known = self._row_bytes
            return min(room, FIRST_ROWS) if known is None else self._fitting(room, known, self._bytes_max)
        bytes_so_far = sum(len(row.body) for row in so_far)
        mean = max(bytes_so_far / len(so_far), self._row_bytes or 0)
        return self._fitting(room, mean, self._bytes_max - bytes_so_far, least=0)

    def learn(self, rows: Sequence[OutboxRow]) -> None:
        """Update the estimate from rows that were read: at once if they are larger, gradually if they are smaller."""
        if rows:
            mean = sum(len(row.body) for row in rows) / len(rows)
            self._row_bytes = max(mean, 0.75 * (self._row_bytes or 0))

    @staticmethod
    def _fitting(room: int, row_bytes: float, bytes_max: float, *, least: int = 1) -> int:
        return room if row_bytes <= 0 else max(least if room else 0, min(room, int(bytes_max / row_bytes)))


# -- what the broker refused for now ----------------------------------------------------------------------------------


class RetryLog:
    """Logs messages that the broker refused for now, one warning per topic and minute. Thread-safe."""

    def __init__(self, source: str, *, clock: Clock) -> None:
        """`source` is the name that logs and metrics give it."""
        self._source = source
        self._topics = LogInterval(clock)

    def write(self, sent: SentBatch) -> None:
        """Log the retries of a batch by topic, with the message tried most often. An outage, which is no row's attempt,
        is logged elsewhere.
        """
        reasons = {
            settlement.row_id: settlement.decision.error
            for settlement in sent.settlements
            if isinstance(settlement.decision, Retry) and settlement.decision.tried
        }
        topics: defaultdict[str, list[OutboxRow]] = defaultdict(list)
        for row in sent.rows:
            if row.id in reasons:
                topics[row.topic].append(row)
        for topic, rows in topics.items():
            if self._topics.is_time(topic):
                row = max(rows, key=lambda row: row.attempts)
                reason = reasons[row.id][:ERROR_CHARS_MAX]
                fields = {"source": self._source, "topic": topic, "rows": len(rows), "attempts": row.attempts}
                logger.warning("messages_retried", extra={**fields, "message_id": row.id, "reason": reason})
