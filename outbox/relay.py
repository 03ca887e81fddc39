"""THE delivery path: a batch of rows to the broker, then what the broker said back into the table. Both the sender
after a commit and the compensator go through deliver(). It neither claims rows nor loops.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, assert_never

from sqlalchemy import Engine

from messaging.broker import Broker
from messaging.errors import BrokerError, BrokerRefused, BrokerThrottled, InvalidMessage, NotAuthorized
from messaging.message import CancelStatus, Message, PublishResult, PublishStatus, check_message_id
from outbox.database import database_errors
from outbox.row import OutboxRow
from outbox.schema import RowKind
from outbox.store import MessageStore

logger = logging.getLogger(__name__)

SETTLE_ROWS_MAX: Final = 200
"""Rows in one settling statement; the knee of the curve between round trips and lock counts."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The broker has it (or had it already): the row may go. `outcome` is the broker's own word."""

    outcome: str


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: due again after the delay. However often that happens, what is unsent is never given up."""

    delay_ms: int
    error: str


@dataclass(frozen=True, slots=True)
class Park:
    """Never, as it is: set aside with the reason, for people to look at."""

    error: str


Decision = Accepted | Retry | Park


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPolicy:
    """How long a row waits when the broker did not take it; whether accepted rows are kept as evidence."""

    outage_delay_ms: int = 5_000
    outage_jitter: float = 0.25
    keep_archive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReport:
    """What became of a batch: how many were accepted, put off and parked; `stale` rows had got another owner meanwhile.

    `outage` carries the broker's error when the broker as a whole did not take anything.
    """

    accepted: int = 0
    retried: int = 0
    parked: int = 0
    stale: int = 0
    outage: BrokerError | None = None


class Relay:
    """Delivers rows that a token owns. Safe in any thread; holds no transaction open across the network."""

    def __init__(
        self, *, engine: Engine, store: MessageStore, broker: Broker, policy: RelayPolicy, random: Random
    ) -> None:
        self._engine = engine
        self._store = store
        self._broker = broker
        self._policy = policy
        self._random = random

    def deliver(self, rows: Sequence[OutboxRow], *, token: str) -> DeliveryReport:
        """Send rows that `token` owns and write down what became of each. Raises DatabaseUnavailable where that failed:
        then the rows stay ours until the lease ends and are sent again, under the same ids.
        """
        decisions, outage = self.send(rows)
        changed = self.settle(decisions, token=token)
        kinds = [type(decision) for decision in decisions.values()]
        return DeliveryReport(
            accepted=kinds.count(Accepted),
            retried=kinds.count(Retry),
            parked=kinds.count(Park),
            stale=len(decisions) - changed,
            outage=outage,
        )

    def reset_after_fork(self) -> None:
        """Let go, in a forked child, of the connections that are the parent's, without a word to the server."""
        self._engine.dispose(close=False)

    def send(self, rows: Sequence[OutboxRow]) -> tuple[dict[str, Decision], BrokerError | None]:
        """The first half: to the broker, and what is to become of each row; nothing is written down yet.

        Publishes first, then cancels: a cancel written in the same transaction must find its message.
        """
        publishes, cancels, decisions = _read(rows)
        outage = self._publish(publishes, decisions) if publishes else None
        if cancels and outage is None:
            outage = self._cancel(cancels, decisions)
        elif outage is not None:
            decisions.update(self._put_off(cancels, outage))
        return decisions, outage

    def _publish(self, rows: Sequence[Message], decisions: dict[str, Decision]) -> BrokerError | None:
        try:
            results = self._broker.publish(rows)
        except (BrokerError, InvalidMessage) as error:
            return self._refused(rows, error, decisions)
        for row, result in zip(rows, results, strict=True):
            decisions[row.id] = decide_publish(result)
        return None

    def _refused(
        self, rows: Sequence[Message], error: BrokerError | InvalidMessage, decisions: dict[str, Decision]
    ) -> BrokerError | None:
        """An outage puts the whole batch off.

        A refusal may be the fault of one row or topic: part them until it is alone.
        """
        if not isinstance(error, BrokerRefused | InvalidMessage):
            decisions.update(self._put_off(rows, error))
            return error
        parts = _by_topic(rows) if isinstance(error, NotAuthorized) else _halves(rows)
        if len(parts) == 1:
            if isinstance(error, NotAuthorized):  # an operator can mend that: wait
                decisions.update(self._put_off(rows, error))
            else:
                decisions.update({row.id: Park(f"refused by the broker: {error}") for row in rows})
            return None
        for part in parts:
            outage = self._publish(part, decisions)
            if outage is not None:
                decisions.update(self._put_off([row for row in rows if row.id not in decisions], outage))
                return outage
        return None

    def _cancel(self, rows: Sequence[OutboxRow], decisions: dict[str, Decision]) -> BrokerError | None:
        try:
            statuses = self._broker.cancel([row.cancels for row in rows])
        except NotAuthorized as error:
            decisions.update(self._put_off(rows, error))
            return None
        except BrokerRefused as error:
            decisions.update({row.id: Park(f"the broker cannot cancel: {error}") for row in rows})
            return None
        except BrokerError as error:
            decisions.update(self._put_off(rows, error))
            return error
        for row, status in zip(rows, statuses, strict=True):
            decisions[row.id] = Accepted(status)
            if status is not CancelStatus.CANCELED:
                logger.warning("cancel_without_effect", extra={"message_id": row.cancels, "status": str(status)})
        return None

    def _put_off(self, rows: Sequence[OutboxRow | Message], error: BrokerError) -> dict[str, Decision]:
        delay_ms = error.retry_after_ms if isinstance(error, BrokerThrottled) else self._policy.outage_delay_ms
        spread = self._policy.outage_jitter * self._random.random()
        return {row.id: Retry(int(delay_ms * (1 + spread)), str(error)) for row in rows}

    def settle(self, decisions: dict[str, Decision], *, token: str) -> int:
        """Write decisions down, those that are alike together, in short transactions; returns how many rows were
        ours.
        """
        alike: defaultdict[Decision, list[str]] = defaultdict(list)
        for row_id, decision in decisions.items():
            alike[decision].append(row_id)
        changed = 0
        with database_errors(self._engine.url):
            for decision, ids in alike.items():
                for start in range(0, len(ids), SETTLE_ROWS_MAX):
                    changed += self._settle_alike(decision, ids[start : start + SETTLE_ROWS_MAX], token=token)
        if changed < len(decisions):
            logger.warning("settled_after_lease_was_lost", extra={"rows": len(decisions) - changed})
        return changed

    def _settle_alike(self, decision: Decision, ids: Sequence[str], *, token: str) -> int:
        with self._engine.begin() as connection:
            match decision:
                case Accepted(outcome):
                    if self._policy.keep_archive:
                        self._store.archive(connection, ids, token=token, outcome=outcome)
                    return self._store.remove(connection, ids, token=token)
                case Retry(delay_ms, error):
                    return self._store.reschedule(connection, ids, token=token, delay_us=delay_ms * 1000, error=error)
                case Park(error):
                    logger.warning("messages_parked", extra={"message_ids": list(ids), "reason": error})
                    return self._store.park(connection, ids, token=token, error=error)
                case _:
                    assert_never(decision)


def decide_publish(result: PublishResult) -> Decision:
    """What to do with a row, from the broker's word on its message. Pure."""
    match result.status:
        case PublishStatus.STORED | PublishStatus.DUPLICATE:
            return Accepted(result.status)
        case PublishStatus.REJECTED:
            return Park(f"rejected by the broker: {result.error or 'no reason given'}")
        case _:
            assert_never(result.status)


def _read(rows: Sequence[OutboxRow]) -> tuple[list[Message], list[OutboxRow], dict[str, Decision]]:
    """What to publish and what to cancel; a row that says neither is parked, so that it holds up no other."""
    publishes: list[Message] = []
    cancels: list[OutboxRow] = []
    decisions: dict[str, Decision] = {}
    for row in rows:
        try:
            match row.kind:
                case RowKind.PUBLISH:
                    publishes.append(row.message())
                case RowKind.CANCEL:
                    check_message_id(row.cancels)
                    cancels.append(row)
                case _:
                    assert_never(row.kind)
        except InvalidMessage as error:
            decisions[row.id] = Park(f"the row cannot be sent as it is: {error}")
    return publishes, cancels, decisions


def _halves(rows: Sequence[Message]) -> list[Sequence[Message]]:
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]] if middle else [rows]


def _by_topic(rows: Sequence[Message]) -> list[Sequence[Message]]:
    topics: defaultdict[str, list[Message]] = defaultdict(list)
    for row in rows:
        topics[row.topic].append(row)
    return list(topics.values())
