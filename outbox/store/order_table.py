"""Order per key: the SQL that numbers the messages of an ordered key in commit order, and finds those that must wait.

Opens no connection and commits nothing; the relay decides what to send from its results.

A transaction takes the next numbers of its keys just before its commit, by updating their rows in `order_head`: the row
stays locked until the commit, so numbers follow the order of commits, which ids and insertion times do not (a
transaction may insert first and commit last), and only producers of the same key wait for each other. Numbers are at
least the database's clock: an idle head may be deleted, and its key continues with higher ones.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
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
    literal_column,
    or_,
    select,
    union_all,
)
from sqlalchemy.sql import ClauseElement

from outbox.store.databases.supported import database_of
from outbox.store.prepared_statements import Build, PreparedByIds
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState, message_table, message_table_names, outbox_tables, plain_message_table_name
from outbox.store.table_placement import MessageTable, table_namespace
from outbox_core.common.table_namespace import TableNamespace

_KEYS_A_STATEMENT_MAX: Final = 50
_ROWS_A_STATEMENT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class KeyRun:
    """The rows of one key that are to be sent: their ids, and the number below which all others must be sent before.

    `table` is the message table of the rows; None: the one that is not split. Older rows of the key may be in another.
    """

    last: int
    own: Collection[str]
    table: MessageTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """The oldest unsent message of a key that another owner has to send: younger ones must wait for it.

    `leased`: another owner has claimed it, and the lease has not ended.
    """

    order_seq: int
    state: RowState
    leased: bool
    due_in_us: int
    due_at_us: int


class _Head(NamedTuple):
    """A row of OrderStore._heads_of; the last four are None if the message is not in the table."""

    order_key: str
    order_seq: int
    message_id: str
    state: str | None
    token: str | None
    due_at_us: int
    due: int


class _Builds(dict[str, Build]):
    """The builders of statements by table name: always the same object, as the key of the compiled statement."""

    def __init__(self, build: Callable[[str, list[BindParameter[str]]], ClauseElement]) -> None:
        self._build = build

    def __missing__(self, name: str) -> Build:
        builder = self[name] = partial(self._build, name)
        return builder


def _barrier(row: Any) -> Barrier:
    return Barrier(
        order_seq=row.order_seq, state=RowState(row.state), leased=row.token is not None and row.due > 0,
        due_in_us=row.due, due_at_us=row.due_at_us,
    )  # fmt: skip


def order_key(topic: str, key: str) -> str:
    """Returns the identifier of a topic's key in the order tables: 128 bits of its SHA-256, as hex."""
    return hashlib.sha256(f"{topic}\0{key}".encode()).hexdigest()[:32]


class OrderStore:
    """The statements on the order tables of one schema. Stateless, so thread-safe."""

    def __init__(self, *, dialect: Dialect, schema: str | None) -> None:
        """`schema`: as the user names it."""
        self._schema = schema
        self._dialect = dialect
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()
        self._by_keys = PreparedByIds(dialect)
        self._head_builds = _Builds(self._heads_of)

    @cached_property
    def _namespace(self) -> TableNamespace:
        return table_namespace(self._dialect, self._schema)

    @cached_property
    def _head(self) -> Table:
        return outbox_tables(self._namespace).order_head

    @cached_property
    def _queue(self) -> Table:
        return outbox_tables(self._namespace).order_queue

    # -- the business transaction ------------------------------------------------------------------------------------

    def number(self, connection: Connection, rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Returns the rows, those of ordered keys with numbers. Their keys stay locked until the commit."""
        keys = sorted({row.order_key for row in rows if row.order_key is not None})
        heads = self._advance(connection, keys, by=len(rows))
        first_numbers = {key: last_number - len(rows) + 1 for key, last_number in heads.items()}
        return [
            row
            if row.order_key is None
            else msgspec.structs.replace(row, order_seq=first_numbers[row.order_key] + position)
            for position, row in enumerate(rows)
        ]

    def enqueue(self, connection: Connection, rows: Sequence[OutboxRow]) -> None:
        """Record the numbers of rows that are being written, as not sent yet."""
        values = [
            {"order_key": row.order_key, "order_seq": row.order_seq, "message_id": row.id}
            for row in rows
            if row.order_key is not None
        ]
        for start in range(0, len(values), _ROWS_A_STATEMENT_MAX):
            connection.execute(insert(self._queue), values[start : start + _ROWS_A_STATEMENT_MAX])

    def _advance(self, connection: Connection, keys: Sequence[str], *, by: int) -> dict[str, int]:
        """Allocate `by` numbers of each key; returns the last of them. Keys must be sorted, so that transactions cannot
        deadlock over them.
        """
        last_numbers: dict[str, int] = {}
        for start in range(0, len(keys), _ROWS_A_STATEMENT_MAX):
            chunk = keys[start : start + _ROWS_A_STATEMENT_MAX]
            connection.execute(self._take(), [{"taken_key": key, "taken": by} for key in chunk])
            last_numbers.update({key: int(seq) for key, seq in self._by_keys.rows(connection, self._numbers_of, chunk)})
        return last_numbers

    def _numbers_of(self, keys: list[BindParameter[str]]) -> ClauseElement:
        # The business's session may have a small max_join_size, which counts the rows of a list of keys but not of
        # single ones, and a small sql_select_limit, which an explicit LIMIT overrides.
        head = self._head
        numbers = [select(head.c.order_key, head.c.seq).where(head.c.order_key == key) for key in keys]
        limit: ColumnElement[int] = literal_column(str(len(keys)))
        return union_all(*numbers).limit(limit) if len(numbers) > 1 else numbers[0].limit(limit)

    def _take(self) -> Any:
        taken = bindparam("taken", type_=BigInteger())
        values = {"order_key": bindparam("taken_key"), "seq": self._now_us + taken}
        return self._database.insert_or_advance(self._head, values, key="order_key", advanced="seq", by=taken)

    # -- sending -----------------------------------------------------------------------------------------------------

    def barriers(self, connection: Connection, runs: Mapping[str, KeyRun]) -> dict[str, Barrier]:
        """Returns, by key, the barrier that its run must wait for, if any, in any message table of the schema.

        A number is allocated under its key's lock: once it can be read, all smaller ones can be read or are deleted.
        A plain read: it locks nothing. All tables, since a key changes its table with their number; a key that moves to
        another schema has other order tables there, so its old one must drain first.
        """
        barriers: dict[str, Barrier] = {}
        unsure: list[str] = []
        for key, head in self._heads(connection, runs).items():
            run = runs[key]
            if head.order_seq >= run.last:
                continue  # ours is the oldest, and the only one: the common case
            if head.message_id in run.own or not head.state:
                unsure.append(key)
            else:
                barriers[key] = _barrier(head)
        for start in range(0, len(unsure), _KEYS_A_STATEMENT_MAX):
            firsts = [select(self._first(key, runs[key])) for key in unsure[start : start + _KEYS_A_STATEMENT_MAX]]
            for row in connection.execute(union_all(*firsts) if len(firsts) > 1 else firsts[0]).all():
                key = row.order_key
                barrier = _barrier(row) if row.state else self._elsewhere(connection, key, runs[key])
                if barrier is not None:
                    barriers[key] = barrier
        return barriers

    def _heads(self, connection: Connection, runs: Mapping[str, KeyRun]) -> dict[str, _Head]:
        """Returns the oldest number of each key, ours or not, with its row if that is in the run's table."""
        by_table: defaultdict[str, list[str]] = defaultdict(list)
        for key, run in runs.items():
            by_table[self._table_of(run)].append(key)
        return {
            row[0]: _Head(*row)
            for name, keys in by_table.items()
            for row in self._by_keys.rows(connection, self._head_builds[name], keys)
        }

    def _heads_of(self, name: str, keys: list[BindParameter[str]]) -> ClauseElement:
        message, queue = message_table(self._namespace.schema, name), self._queue
        oldest = (
            select(queue.c.order_key, func.min(queue.c.order_seq).label("first_seq"))
            .where(queue.c.order_key.in_(keys))
            .group_by(queue.c.order_key)
            .subquery()
        )
        of_oldest = (queue.c.order_key == oldest.c.order_key) & (queue.c.order_seq == oldest.c.first_seq)
        return (
            select(queue.c.order_key, queue.c.order_seq, queue.c.message_id, *self._row_columns(message))
            .select_from(oldest)
            .join(queue, of_oldest)
            .outerjoin(message, message.c.id == queue.c.message_id)
        )

    def _row_columns(self, message: Table) -> list[Any]:
        due = (message.c.due_at_us - self._now_us).label("due")
        return [message.c.state, message.c.token, message.c.due_at_us, due]

    def _table_of(self, run: KeyRun) -> str:
        return run.table.name if run.table is not None else plain_message_table_name(self._namespace)

    def _elsewhere(self, connection: Connection, key: str, run: KeyRun) -> Barrier | None:
        """Returns the barrier of a key whose oldest number has no row in the run's table: the row was written before
        the number of tables was changed, or it was deleted, for instance by hand, and blocks no other.
        """
        names = message_table_names(connection, self._namespace)
        rows = [
            row
            for name in names
            for row in connection.execute(
                select(self._first(key, run, message=message_table(self._namespace.schema, name), is_there=True))
            )
        ]
        return _barrier(min(rows, key=lambda row: row.order_seq)) if rows else None

    def forget(self, connection: Connection, numbers: Sequence[tuple[str, int]]) -> None:
        """Delete the numbers of sent or discarded messages: younger ones need not wait for them any more."""
        queue = self._queue
        for start in range(0, len(numbers), _ROWS_A_STATEMENT_MAX):
            chunk = sorted(numbers[start : start + _ROWS_A_STATEMENT_MAX])
            pairs = [and_(queue.c.order_key == key, queue.c.order_seq == seq) for key, seq in chunk]
            connection.execute(self._database.by_primary_key(delete(queue).where(or_(*pairs)), self._dialect))

    def _first(self, key: str, run: KeyRun, *, message: Table | None = None, is_there: bool = False) -> Any:
        """Selects the oldest of a key's numbers below the run's last that is not ours, with its row if that is in the
        run's table; with `is_there` the oldest that has a row in this one.
        """
        queue = self._queue
        if message is None:
            message = message_table(self._namespace.schema, self._table_of(run))
        statement = (
            select(queue.c.order_key, queue.c.order_seq, *self._row_columns(message))
            .join(message, message.c.id == queue.c.message_id, isouter=not is_there)
            .where(queue.c.order_key == key, queue.c.order_seq < run.last, queue.c.message_id.not_in(sorted(run.own)))
            .order_by(queue.c.order_key, queue.c.order_seq)
            .limit(1)
        )
        return statement.subquery()

    # -- retention ---------------------------------------------------------------------------------------------------

    def purge_heads(self, connection: Connection, *, idle_us: int, after: str, limit: int) -> tuple[int, str | None]:
        """Delete heads of keys that have no unsent messages and were idle for `idle_us`, among the `limit` keys after
        `after`; returns how many, and the cursor of the next call (None at the end).

        It reads without locks and deletes by primary key: a producer of another key never waits.
        """
        head, queue = self._head, self._queue
        waiting = exists().where(queue.c.order_key == head.c.order_key)
        heads_read = connection.execute(
            select(head.c.order_key, ((head.c.seq < self._now_us - idle_us) & ~waiting).label("is_idle"))
            .where(head.c.order_key > after)
            .order_by(head.c.order_key)
            .limit(limit)
        ).all()
        idle_keys = [row.order_key for row in heads_read if row.is_idle]
        deleted = 0
        if idle_keys:
            is_still_idle = head.c.seq < self._now_us - literal(idle_us, BigInteger())
            delete_idle = delete(head).where(head.c.order_key.in_(idle_keys), is_still_idle)
            deleted = connection.execute(self._database.by_primary_key(delete_idle, self._dialect)).rowcount
        return deleted, heads_read[-1].order_key if len(heads_read) == limit else None
