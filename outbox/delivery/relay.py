"""The relay, the only delivery path: publishes a batch of rows, then writes the results to the table. Both the sender
after a commit and the compensator use it. It neither claims rows nor loops.

What becomes of each row (SendBatch), and which rows of an ordered key may go together (the waves), are decided without
I/O, at the end of this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, assert_never

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from outbox.store.async_background import AsyncBackground, transact
from outbox.store.database import CONFLICT_RETRIES_MAX, database_errors, is_unreachable, retry_conflicts
from outbox.store.message_table import MessageStore
from outbox.store.order_table import Barrier, KeyRun
from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind, RowState
from outbox.store.table_placement import MessageTable
from outbox.telemetry import NO_TELEMETRY, SendPath, Telemetry
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import (
    BrokerError,
    BrokerRefused,
    BrokerThrottled,
    DatabaseUnavailable,
    InvalidMessage,
    NotAuthorized,
    OutboxError,
)
from outbox_core.messages.broker_port import Broker, Capability, capabilities_of
from outbox_core.messages.delivery_decision import Acceptance, Park, Retry, TopicStalls, decide, retry
from outbox_core.messages.message import (
    CancelStatus,
    Message,
    PublishResult,
    check_message_id,
    due_message,
)
from outbox_core.messages.refused_batch_isolation import publish_isolated
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_RowMessage = tuple[OutboxRow, Message]

ORDERED_OUTAGE_DELAY_MS: Final = 1_000
SETTLE_ROWS_MAX: Final = 200
"""Rows in one settling statement: a compromise between round trips and the number of locks."""
HOLD_DELAY_MS_MIN: Final = 10
PARKED_DELAY_MS: Final = 30_000
"""The delay of a message that waits for one that an operator must handle."""
_HOLD_STEPS: Final = 8
"""Delays are rounded up, by an eighth at most, to few different ones, so that one statement postpones many rows."""
IN_FLIGHT_DELAY_MS: Final = 500
"""The delay of a message that waits for one that another process is sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPolicy:
    """The delays of rows that the broker did not accept; whether accepted rows are archived as evidence.

    In an outage all rows wait for `outage_delay_ms`. A row that was rejected for a reason that an operator can remove
    waits for its own `backoff`.
    """

    outage_delay_ms: int = 5_000
    outage_jitter: float = 0.25
    backoff: Backoff = field(default_factory=Backoff)
    keep_archive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReport:
    """The result of a batch: how many rows were accepted, postponed, held behind an older message of their key, and
    parked; `stale` rows had another owner by then.

    `outage` has the broker's error if the broker was unavailable as a whole.
    """

    accepted: int = 0
    retried: int = 0
    held: int = 0
    parked: int = 0
    stale: int = 0
    outage: BrokerError | None = None


@dataclass(frozen=True, slots=True)
class SettleReport:
    """The result of settling: how many rows the token still owned; and the settlements that could not be written, with
    the first of their errors. Those may be repeated, also if it is unknown whether they were written: the token guards
    each row.
    """

    changed: int
    unsettled: Sequence[RowSettlement] = ()
    error: OutboxError | None = None


class Relay:
    """Delivers rows that a token owns. Thread-safe; holds no transaction open during requests to the broker."""

    def __init__(
        self,
        *,
        engine: Engine | AsyncBackground,
        store: MessageStore,
        broker: Broker,
        policy: RelayPolicy,
        random: Random,
        telemetry: Telemetry = NO_TELEMETRY,
        path: SendPath = SendPath.INLINE,
    ) -> None:
        """`store`: of any message table on the database; rows of another table are settled in theirs."""
        self._engine = engine
        self._store = store
        self._broker = broker
        self._policy = policy
        self._random = random
        self._telemetry = telemetry
        self._path = path
        self._stalls = TopicStalls()

    @property
    def broker(self) -> Broker:
        """Returns the broker to which it delivers."""
        return self._broker

    def deliver(
        self, rows: Sequence[OutboxRow], *, token: str, in_time: Callable[[], bool] = lambda: True
    ) -> DeliveryReport:
        """Send rows that `token` owns and write the result of each. Raises DatabaseUnavailable if the write failed:
        then the token owns the rows until the lease ends, and they are sent again, under the same ids. `in_time`: as
        in send().
        """
        settlements, outage = self.send(rows, in_time=in_time)
        settled = self.settle(settlements, token=token)
        if settled.error is not None:
            raise settled.error
        kinds = [type(settlement.decision) for settlement in settlements]
        return DeliveryReport(
            accepted=kinds.count(Acceptance),
            retried=kinds.count(Retry),
            held=kinds.count(Hold),
            parked=kinds.count(Park),
            stale=len(settlements) - settled.changed,
            outage=outage,
        )

    def reset_after_fork(self) -> None:
        """Drop the parent's connections in a forked child, without sending anything to the server."""
        self._engine.dispose(close=False)

    # -- the first half: to the broker -------------------------------------------------------------------------------

    def send(
        self,
        rows: Sequence[OutboxRow],
        *,
        accepted: Mapping[str, Collection[str]] | None = None,
        in_time: Callable[[], bool] = lambda: True,
    ) -> tuple[list[RowSettlement], BrokerError | None]:
        """Send rows to the broker, and return the settlement of each, which settle() has to write.

        Publishes first, then cancels: a cancel written in the same transaction must find its message. `accepted`: by
        order key, ids that the broker has accepted though their rows still exist. `in_time` is asked before each of the
        requests to the broker, which may be many: of waves, and of parts of what was refused. Raises
        DatabaseUnavailable if the order of keys could not be read.
        """
        barriers = self._barriers(rows, accepted or {})
        batch = SendBatch(rows, barriers, jitter=self._random.random(), in_time=in_time)
        publishes, cancels = self._read(rows, batch)
        outage = self._publish_in_waves(publishes, batch)
        if cancels and outage is None:
            outage = self._cancel(cancels, batch)
        elif outage is not None:
            self._postpone([row.id for row in cancels], outage, batch)
        return batch.settlements(), outage

    def _barriers(self, rows: Sequence[OutboxRow], accepted: Mapping[str, Collection[str]]) -> Mapping[str, Barrier]:
        """Returns the barriers of the ordered rows: older messages of their keys that other owners have to send."""
        by_schema: defaultdict[str | None, list[OutboxRow]] = defaultdict(list)
        for row in rows:
            if row.order_key is not None:
                by_schema[row.table.schema if row.table is not None else self._store.table.schema].append(row)
        barriers: dict[str, Barrier] = {}
        for ordered in by_schema.values():
            read_barriers = partial(self._store.at(ordered[0].table).barriers, runs=runs(ordered, accepted=accepted))
            with database_errors(self._engine.url):
                barriers.update(transact(self._engine, read_barriers))
        return barriers

    def _read(self, rows: Sequence[OutboxRow], batch: SendBatch) -> tuple[dict[str, _RowMessage], list[OutboxRow]]:
        """Returns messages to publish and cancels; decides on rows that are neither, so that they block no others."""
        publishes: dict[str, _RowMessage] = {}
        cancels: list[OutboxRow] = []
        for row in rows:
            try:
                row.check_body()
                match row.kind:
                    case RowKind.PUBLISH:
                        if (message := self._due_message(row, batch)) is not None:
                            publishes[row.id] = (row, message)
                    case RowKind.CANCEL:
                        check_message_id(row.cancels)
                        cancels.append(row)
                    case RowKind.UNKNOWN:
                        self._back_off(row, "written by newer code: upgrade this process", batch)
                    case _:
                        assert_never(row.kind)
            except InvalidMessage as error:
                batch.decide(row.id, Park(f"the row cannot be sent as it is: {error}"))
        return publishes, cancels

    def _due_message(self, row: OutboxRow, batch: SendBatch) -> Message | None:
        """Returns the row's message. A broker that cannot delay gets it when it is due, for now; None: it is not, by
        the database's clock, and waits in the table.
        """
        message = row.message()
        if row.deliver_in_us is None or Capability.DELAY in capabilities_of(self._broker):
            return message
        if row.deliver_in_us <= 0:
            return due_message(message)
        batch.decide(row.id, Retry(-(-row.deliver_in_us // 1000), "", tried=False))
        return None

    def _publish_in_waves(self, publishes: Mapping[str, _RowMessage], batch: SendBatch) -> BrokerError | None:
        outage: BrokerError | None = None
        for wave in waves([row for row, _ in publishes.values()]):
            going = batch.free(wave)
            if outage is not None:
                self._postpone([row.id for row in going], outage, batch)
            elif going:
                outage = self._publish([publishes[row.id] for row in going], batch)
        return outage

    def _publish(self, row_messages: Sequence[_RowMessage], batch: SendBatch) -> BrokerError | None:
        messages = [message for _, message in row_messages]
        published = publish_isolated(self._publish_once, messages, in_time=batch.in_time)
        stalls = self._stalls.tried((messages[position], result) for position, result in published.results.items())
        for position, result in published.results.items():
            row, message = row_messages[position]
            decision = decide(
                result,
                attempts=row.attempts,
                stalls=stalls[message.topic],
                backoff=self._policy.backoff,
                jitter=batch.jitter,
            )
            batch.decide(row.id, decision)
        undecided = batch.undecided(row.id for row, _ in row_messages)
        if published.outage is not None:
            self._postpone(undecided, published.outage, batch)
        else:
            batch.hold(undecided)
        return published.outage

    def _publish_once(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        with self._telemetry.sending(messages, path=self._path) as sending:
            sending.results = results = self._broker.publish(messages)
        return results

    def _cancel(self, rows: Sequence[OutboxRow], batch: SendBatch) -> BrokerError | None:
        if not batch.in_time():
            batch.hold(row.id for row in rows)
            return None
        try:
            statuses = self._broker.cancel([row.cancels for row in rows])
        except NotAuthorized as error:
            for row in rows:
                self._back_off(row, str(error), batch)
            return None
        except BrokerRefused as error:
            for row in rows:
                batch.decide(row.id, Park(f"the broker cannot cancel: {error}"))
            return None
        except BrokerError as error:
            self._postpone([row.id for row in rows], error, batch)
            return error
        for row, status in zip(rows, statuses, strict=True):
            batch.decide(row.id, Acceptance(status))
            if status is not CancelStatus.CANCELED:
                logger.warning("cancel_without_effect", extra={"message_id": row.cancels, "status": str(status)})
        return None

    def _postpone(self, ids: Sequence[str], error: BrokerError, batch: SendBatch) -> None:
        """Postpone rows in an outage, which they did not cause: it does not count as an attempt."""
        delay_ms = error.retry_after_ms if isinstance(error, BrokerThrottled) else self._policy.outage_delay_ms
        retry = Retry(int(delay_ms * (1 + self._policy.outage_jitter * batch.jitter)), str(error), tried=False)
        # Younger messages wait for ordered rows, so they are retried soon, after all rows that are due by then. The
        # circuit breaker, not their delay, keeps requests away from an unavailable broker.
        soon_ms = delay_ms if isinstance(error, BrokerThrottled) else min(delay_ms, ORDERED_OUTAGE_DELAY_MS)
        soon = Retry(soon_ms, str(error), tried=False)
        for row_id in ids:
            batch.decide(row_id, soon if batch.is_ordered(row_id) else retry)

    def _back_off(self, row: OutboxRow, error: str, batch: SendBatch) -> None:
        """Postpone a row that cannot be sent until an operator acts, by its own backoff."""
        batch.decide(row.id, retry(error, attempts=row.attempts, backoff=self._policy.backoff, jitter=batch.jitter))

    # -- the second half: into the table -----------------------------------------------------------------------------

    def settle(self, settlements: Sequence[RowSettlement], *, token: str) -> SettleReport:
        """Write decisions to the table, equal ones together, in short transactions. What one of them fails with does
        not keep the others from being written, unless the database cannot be reached.
        """
        alike: defaultdict[tuple[MessageTable | None, Decision], list[RowSettlement]] = defaultdict(list)
        for settlement in settlements:
            alike[(settlement.table, settlement.decision)].append(settlement)
        chunks = [
            (self._store.at(table), decision, equal_settlements[start : start + SETTLE_ROWS_MAX])
            for (table, decision), equal_settlements in alike.items()
            for start in range(0, len(equal_settlements), SETTLE_ROWS_MAX)
        ]
        changed, unsettled, error = 0, list[RowSettlement](), None
        for chunk_index, (store, decision, chunk) in enumerate(chunks):
            settle = partial(self._settle_alike, store, decision, chunk, token=token)
            try:
                with database_errors(self._engine.url):
                    changed += _retry_takeovers(partial(_retry_if_lost, partial(retry_conflicts, settle)))
            except OutboxError as failed:
                error = error or failed
                unsettled += chunk
                if is_unreachable(failed.__cause__):
                    unsettled += [
                        settlement for *_, later_chunk in chunks[chunk_index + 1 :] for settlement in later_chunk
                    ]
                    break
        stale = len(settlements) - len(unsettled) - changed
        if stale:
            logger.warning("settled_after_lease_was_lost", extra={"rows": stale})
        return SettleReport(changed, unsettled, error)

    def _settle_alike(
        self, store: MessageStore, decision: Decision, settlements: Sequence[RowSettlement], *, token: str
    ) -> int:
        ids = [settlement.row_id for settlement in settlements]

        def settle(connection: Connection) -> int:
            match decision:
                case Acceptance(outcome):
                    archived = None
                    if self._policy.keep_archive:
                        archived = store.archive(connection, ids, token=token, outcome=outcome)
                    numbers = {
                        settlement.row_id: settlement.key_and_number
                        for settlement in settlements
                        if settlement.key_and_number is not None
                    }
                    removed = store.remove(connection, ids, token=token, numbers=numbers)
                    if archived not in (None, removed):
                        raise _TakenOverError
                    return removed
                case Retry(delay_ms, error, tried=True):
                    return store.reschedule(connection, ids, token=token, delay_us=delay_ms * 1000, error=error)
                case Retry(delay_ms, error):
                    return store.release(connection, ids, token=token, delay_us=delay_ms * 1000, error=error or None)
                case Hold(delay_ms):
                    return store.release(connection, ids, token=token, delay_us=delay_ms * 1000, error=None)
                case Park(error):
                    logger.warning("messages_parked", extra={"message_ids": ids, "reason": error})
                    return store.park(connection, ids, token=token, error=error)
                case _:
                    assert_never(decision)

        return transact(self._engine, settle)


class _TakenOverError(Exception):
    """A row got another owner between its archive entry and its removal; the transaction is rolled back."""


def _retry_if_lost(settle: Callable[[], int]) -> int:
    """Retries a settlement once on a new connection. It is unknown whether a COMMIT in flight was done: if so, the
    token owns none of its rows any more, and the second one changes nothing.
    """
    try:
        return settle()
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    return settle()


def _retry_takeovers(settle: Callable[[], int]) -> int:
    """Retries a settlement: the archive is written from a read without locks, so a row may be claimed in between."""
    for _ in range(CONFLICT_RETRIES_MAX):
        try:
            return settle()
        except _TakenOverError:
            logger.info("settle_repeated")
    try:
        return settle()
    except _TakenOverError as error:
        raise DatabaseUnavailable(
            "rows change hands faster than they can be settled; their leases are too short"
        ) from error


@dataclass(frozen=True, slots=True)
class Hold:
    """The row waits for an older message of its ordered key, or for another owner: this one's lease may be over. It is
    retried after the delay.
    """

    delay_ms: int


Decision = Acceptance | Retry | Hold | Park


@dataclass(frozen=True, slots=True)
class RowSettlement:
    """The decision to write for one row; `key_and_number`: its order key and number, if it is ordered."""

    row_id: str
    table: MessageTable | None
    key_and_number: tuple[str, int] | None
    decision: Decision


@dataclass(frozen=True, slots=True)
class _Stop:
    """The number from which on a key's messages are held, and the delay."""

    seq: int
    delay_ms: int


class SendBatch:
    """Rows that are being sent, and the decision on each.

    After any decision but Acceptance on a message of an ordered key, the younger ones of its key are held.
    """

    def __init__(
        self,
        rows: Sequence[OutboxRow],
        barriers: Mapping[str, Barrier],
        *,
        jitter: float,
        in_time: Callable[[], bool] = lambda: True,
    ) -> None:
        """`barriers`: by order key, the oldest unsent message that another owner has to send. `jitter`, 0 to 1, is the
        jitter of this batch's delays: the same for all its rows, so that equal decisions are written together.
        `in_time`: whether another request to the broker may begin.
        """
        self.jitter = jitter
        self.in_time: Callable[[], bool] = in_time
        self._rows = {row.id: row for row in rows}
        self._decisions: dict[str, Decision] = {}
        self._stops = {key: _Stop(barrier.order_seq, hold_delay_ms(barrier)) for key, barrier in barriers.items()}

    def decide(self, row_id: str, decision: Decision) -> None:
        """Record the decision on a row."""
        self._decisions[row_id] = decision
        row = self._rows[row_id]
        if row.order_key is None or row.order_seq is None or isinstance(decision, Acceptance):
            return
        stop = self._stops.get(row.order_key)
        if stop is None or row.order_seq < stop.seq:
            delay_ms = decision.delay_ms if isinstance(decision, Retry | Hold) else IN_FLIGHT_DELAY_MS
            self._stops[row.order_key] = _Stop(row.order_seq, delay_ms)

    def hold(self, ids: Iterable[str]) -> None:
        """Record that these rows are not sent by this owner any more."""
        for row_id in ids:
            self.decide(row_id, Hold(IN_FLIGHT_DELAY_MS))

    def is_ordered(self, row_id: str) -> bool:
        """Returns whether the row has an ordered key."""
        return self._rows[row_id].order_key is not None

    def free(self, rows: Iterable[OutboxRow]) -> list[OutboxRow]:
        """Returns the rows that may be sent now; the others are decided: held behind an older message of their key."""
        going: list[OutboxRow] = []
        for row in rows:
            stop = None if row.order_key is None else self._stops.get(row.order_key)
            if stop is None or (row.order_seq or 0) < stop.seq:
                going.append(row)
            else:
                self.decide(row.id, Hold(stop.delay_ms))
        return going

    def undecided(self, ids: Iterable[str]) -> list[str]:
        """Returns the ids without a decision."""
        return [row_id for row_id in ids if row_id not in self._decisions]

    def settlements(self) -> list[RowSettlement]:
        """Returns the settlement of each row. Every row must have a decision."""
        return [_settlement(row, self._decisions[row.id]) for row in self._rows.values()]


def _settlement(row: OutboxRow, decision: Decision) -> RowSettlement:
    key_and_number = None if row.order_key is None or row.order_seq is None else (row.order_key, row.order_seq)
    return RowSettlement(row.id, row.table, key_and_number, decision)


def runs(rows: Iterable[OutboxRow], *, accepted: Mapping[str, Collection[str]]) -> dict[str, KeyRun]:
    """Returns the rows of a batch by ordered key; `accepted` has, by order key, ids that the broker has already
    accepted to the caller's knowledge, though their rows still exist.
    """
    by_key: defaultdict[str, list[OutboxRow]] = defaultdict(list)
    for row in rows:
        if row.order_key is not None:
            by_key[row.order_key].append(row)
    return {
        key: KeyRun(
            max(row.order_seq or 0 for row in of_key),
            {*(row.id for row in of_key), *accepted.get(key, ())},
            of_key[-1].table,
        )
        for key, of_key in by_key.items()
    }


def waves(rows: Sequence[OutboxRow]) -> list[list[OutboxRow]]:
    """Returns the batches to send in turn; each keeps the order of `rows`, and each key the order of its numbers.

    The first wave has the first message of each ordered key and all unordered ones, the second wave the second message
    of each key, and so on: a message is sent only after the broker has accepted all older ones of its key, and a broker
    may accept any part of a batch.
    """
    batches: list[list[OutboxRow]] = [[]]
    next_wave_by_key: defaultdict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row.order_seq or 0) if any(row.order_key for row in rows) else rows:
        wave_index = 0
        if row.order_key is not None:
            wave_index = next_wave_by_key[row.order_key]
            next_wave_by_key[row.order_key] += 1
        if wave_index == len(batches):
            batches.append([])
        batches[wave_index].append(row)
    return batches


def hold_delay_ms(barrier: Barrier) -> int:
    """Returns the delay after which messages that wait for this barrier are retried."""
    if barrier.state is not RowState.PENDING:
        return PARKED_DELAY_MS
    if barrier.leased:
        return IN_FLIGHT_DELAY_MS
    due_in_ms = max(HOLD_DELAY_MS_MIN, barrier.due_in_us // 1000 + 1)
    step_ms = max(1, (1 << (due_in_ms.bit_length() - 1)) // _HOLD_STEPS)
    return -(-due_in_ms // step_ms) * step_ms
