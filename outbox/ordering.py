"""Order per key: the SQL that numbers the messages of an ordered key in commit order and says which must wait.

It opens no connection and commits nothing; what follows from the answers is decided in outbox.waves.

A transaction takes the next numbers of its keys just before its commit, by updating their rows in `order_head`: the row
stays locked until the commit, so numbers follow the order of commits, and only producers of the same key wait for each
other. Numbers are at least the database's clock: a head that was idle may be deleted, and its key goes on from above.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import (
    BigInteger,
    Connection,
    Dialect,
    Table,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects import mysql, sqlite

from outbox.database import MYSQL_DIALECTS, by_primary_key, now_us
from outbox.row import OutboxRow
from outbox.schema import RowState, outbox_tables

_KEYS_A_STATEMENT_MAX: Final = 50
_ROWS_A_STATEMENT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Run:
    """What somebody wants to send of one key: below which number others must be gone, and the ids in our hands."""

    last: int
    own: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """The oldest message of a key that is not sent and not in our hands: what is younger must wait for it."""

    order_seq: int
    state: RowState
    leased: bool
    due_in_us: int


def order_key(topic: str, key: str) -> str:
    """What stands for a topic's key in the order tables: 128 bits of its SHA-256, as hex."""
    return hashlib.sha256(f"{topic}\0{key}".encode()).hexdigest()[:32]


class OrderStore:
    """The statements on the order tables of one schema. Stateless, so safe in any thread."""

    def __init__(self, *, dialect: Dialect, schema: str | None) -> None:
        """`schema`: as it applies on the dialect, None on SQLite."""
        tables = outbox_tables(schema)
        self._head = tables.order_head
        self._queue = tables.order_queue
        self._dialect = dialect
        self._mysql = dialect.name in MYSQL_DIALECTS
        self._now_us = now_us(dialect)

    # -- the business transaction ------------------------------------------------------------------------------------

    def number(self, connection: Connection, rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        """The rows, those of ordered keys with their numbers. From here to the commit their keys are locked."""
        keys = sorted({row.order_key for row in rows if row.order_key is not None})
        heads = self._advance(connection, keys, by=len(rows))
        first = {key: last - len(rows) + 1 for key, last in heads.items()}
        return [
            row if row.order_key is None else msgspec.structs.replace(row, order_seq=first[row.order_key] + place)
            for place, row in enumerate(rows)
        ]

    def enqueue(self, connection: Connection, rows: Sequence[OutboxRow]) -> None:
        """Note the numbers of rows that are being written, as not sent yet."""
        values = [
            {"order_key": row.order_key, "order_seq": row.order_seq, "message_id": row.id}
            for row in rows
            if row.order_key is not None
        ]
        for start in range(0, len(values), _ROWS_A_STATEMENT_MAX):
            connection.execute(insert(self._queue), values[start : start + _ROWS_A_STATEMENT_MAX])

    def _advance(self, connection: Connection, keys: Sequence[str], *, by: int) -> dict[str, int]:
        """Take `by` numbers of each key; returns the last of them. Keys come sorted: two transactions cannot deadlock
        over them.
        """
        found: dict[str, int] = {}
        for start in range(0, len(keys), _ROWS_A_STATEMENT_MAX):
            chunk = keys[start : start + _ROWS_A_STATEMENT_MAX]
            connection.execute(self._take(), [{"taken_key": key, "taken": by} for key in chunk])
            mine = select(self._head.c.order_key, self._head.c.seq).where(self._head.c.order_key.in_(chunk))
            found.update({row.order_key: row.seq for row in connection.execute(mine)})
        return found

    def _take(self) -> Any:
        taken = bindparam("taken", type_=BigInteger())
        values = {"order_key": bindparam("taken_key"), "seq": self._now_us + taken}
        if self._mysql:
            new = mysql.insert(self._head).values(values)
            return new.on_duplicate_key_update(seq=func.greatest(self._head.c.seq + taken, new.inserted.seq))
        other = sqlite.insert(self._head).values(values)
        return other.on_conflict_do_update(
            index_elements=["order_key"], set_={"seq": func.max(self._head.c.seq + taken, other.excluded.seq)}
        )

    # -- sending -----------------------------------------------------------------------------------------------------

    def barriers(self, connection: Connection, message: Table, runs: Mapping[str, Run]) -> dict[str, Barrier]:
        """For each key that somebody wants to send a run of: what that must wait for, if anything.

        A number is taken under its key's lock: once it can be read, all smaller ones can, or are gone. A plain read:
        it locks nothing.
        """
        found: dict[str, Barrier] = {}
        keys = sorted(runs)
        for start in range(0, len(keys), _KEYS_A_STATEMENT_MAX):
            firsts = [
                select(self._first(message, key, runs[key])) for key in keys[start : start + _KEYS_A_STATEMENT_MAX]
            ]
            for row in connection.execute(union_all(*firsts) if len(firsts) > 1 else firsts[0]):
                found[row.order_key] = Barrier(
                    order_seq=row.order_seq, state=RowState(row.state), leased=row.token is not None, due_in_us=row.due
                )
        return found

    def forget(self, connection: Connection, numbers: Sequence[tuple[str, int]]) -> None:
        """Their messages are sent, or discarded: what is younger need not wait for them any more."""
        queue = self._queue
        for start in range(0, len(numbers), _ROWS_A_STATEMENT_MAX):
            chunk = sorted(numbers[start : start + _ROWS_A_STATEMENT_MAX])
            pairs = [and_(queue.c.order_key == key, queue.c.order_seq == seq) for key, seq in chunk]
            connection.execute(by_primary_key(delete(queue).where(or_(*pairs)), self._dialect))

    def _first(self, message: Table, key: str, run: Run) -> Any:
        """The oldest of a key's unsent messages below a number that is not ours. A number whose row is gone, by hand
        for instance, holds up nobody.
        """
        queue = self._queue
        statement = (
            select(
                queue.c.order_key,
                queue.c.order_seq,
                message.c.state,
                message.c.token,
                (message.c.due_at_us - self._now_us).label("due"),
            )
            .join(message, message.c.id == queue.c.message_id)
            .where(queue.c.order_key == key, queue.c.order_seq < run.last, queue.c.message_id.not_in(sorted(run.own)))
            .order_by(queue.c.order_key, queue.c.order_seq)
            .limit(1)
        )
        return statement.subquery()

    # -- retention ---------------------------------------------------------------------------------------------------

    def purge_heads(self, connection: Connection, *, idle_us: int, after: str, limit: int) -> tuple[int, str | None]:
        """Delete heads of keys without unsent messages that were idle for so long, looking at `limit` keys behind
        `after`; returns how many went and where to go on (None: at the end).

        Found by plain reads and deleted by primary key: a producer of another key never waits.
        """
        head, queue = self._head, self._queue
        waiting = exists().where(queue.c.order_key == head.c.order_key)
        looked_at = connection.execute(
            select(head.c.order_key, ((head.c.seq < self._now_us - idle_us) & ~waiting).label("is_idle"))
            .where(head.c.order_key > after)
            .order_by(head.c.order_key)
            .limit(limit)
        ).all()
        idle = [row.order_key for row in looked_at if row.is_idle]
        gone = 0
        if idle:
            still = head.c.seq < self._now_us - literal(idle_us, BigInteger())
            idle_ones = delete(head).where(head.c.order_key.in_(idle), still)
            gone = connection.execute(by_primary_key(idle_ones, self._dialect)).rowcount
        return gone, looked_at[-1].order_key if len(looked_at) == limit else None
