"""All SQL of the message table: insert, claim, settle, count. Opens no connection and commits nothing.

Every write after the insert is guarded by the row's token, never by the id alone: a former owner changes nothing.
Every locking statement selects rows by primary key, in sorted order: no gap is locked that a producer's INSERT needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Select,
    String,
    Table,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import ClauseElement

from outbox.store.bounded_counts import count_rows, oldest_wanted_age_us, retrying_rows, sample_pending
from outbox.store.databases.database_port import Write
from outbox.store.databases.supported import database_of
from outbox.store.order_table import Barrier, KeyRun, OrderStore
from outbox.store.prepared_statements import HintedStatement, PreparedByIds, PreparedStatement, prepare
from outbox.store.row import OutboxRow
from outbox.store.schema import (
    OutboxTables,
    RowKind,
    RowState,
    along_due_index,
    message_table,
    outbox_tables,
    plain_message_table_name,
)
from outbox.store.server_limits import STATEMENT_BYTES_MAX, row_bytes
from outbox.store.table_placement import MessageTable, table_namespace
from outbox_core.common.errors import utf8_text
from outbox_core.common.table_namespace import TableNamespace

ERROR_CHARS_MAX: Final = 1024
BEHIND_SPREAD_US: Final = 1_000_000
_PENDING: Final = literal_column(f"'{RowState.PENDING.value}'", String())
_PARKED: Final = literal_column(f"'{RowState.PARKED.value}'", String())
ARCHIVED_COLUMNS: Final = (
    "id", "kind", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us", "attempts",
)  # fmt: skip
_ROW_COLUMNS: Final = (
    "id", "kind", "topic", "body", "body_sha256", "message_key", "headers", "deliver_at_ms", "created_at_us",
    "attempts", "order_key", "order_seq",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The backlog of a message table: counts of pending, of due and unleased, of retrying (see bounded_counts.py), and
    of parked rows; for how long the oldest pending message has been wanted, since its commit or its due time.
    """

    pending: int
    due: int
    retrying: int
    parked: int
    oldest_due_age_us: int


@dataclass(frozen=True, slots=True)
class DueRows:
    """Due rows, the longest due first, and the due time of the last of them, where the next read begins."""

    rows: Sequence[OutboxRow]
    last_due_us: int


class MessageStore:
    """The statements on one set of outbox tables, for one dialect. Stateless, so thread-safe."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None, table: str | None = None) -> None:
        """`schema`: as the user names it. `table`: the whole name of one of its message tables; by default the one that
        is not split.
        """
        self._dialect = dialect
        self.schema: str | None = schema
        self._table = table
        self._order = OrderStore(dialect=dialect, schema=schema)
        self._database = database_of(dialect)
        self._now_us = self._database.now_us()
        self._by_ids = PreparedByIds(dialect)

    # A store is made before its engine connects, and only a connection knows the namespace.
    @cached_property
    def namespace(self) -> TableNamespace:
        """Where the tables are; see table_namespace()."""
        return table_namespace(self._dialect, self.schema)

    @cached_property
    def table(self) -> MessageTable:
        """The message table."""
        return MessageTable(self.namespace.schema, self._table or plain_message_table_name(self.namespace))

    @cached_property
    def tables(self) -> OutboxTables:
        """All tables of the namespace."""
        return outbox_tables(self.namespace)

    @cached_property
    def _message(self) -> Table:
        return message_table(self.table.schema, self.table.name)

    @cached_property
    def _insert(self) -> RowInsert:
        return RowInsert(self._dialect, self.table)

    def at(self, table: MessageTable | None) -> MessageStore:
        """Returns the store of another message table on the same database; this store for None."""
        if table is None or table == self.table:
            return self
        return _store(self._dialect, table)

    # A producer asks for no due rows, and each of these takes milliseconds to compile.
    @cached_property
    def _due(self) -> HintedStatement:
        return self._prepared_due("id")

    @cached_property
    def _due_whole(self) -> HintedStatement:
        return self._prepared_due(*_ROW_COLUMNS, "due_at_us", also=[self._deliver_in_us()])

    # -- the business transaction ------------------------------------------------------------------------------------

    def insert(
        self,
        connection: Connection,
        rows: Sequence[OutboxRow],
        *,
        token: str,
        lease_us: int,
        packet_bytes: int | None = None,
        state: RowState = RowState.PENDING,
    ) -> Sequence[OutboxRow]:
        """Write rows that this token owns until now + lease, with as few multi-row INSERTs as the limits allow
        (mostly one; `packet_bytes` is the server's limit). Returns them as written: those of ordered keys with their
        numbers.
        """
        ordered = any(row.order_key is not None for row in rows)
        if ordered:
            rows = self._order.number(connection, rows)
            self._order.enqueue(connection, rows)
        self._insert(connection, rows, token=token, lease_us=lease_us, packet_bytes=packet_bytes, state=state)
        return rows

    # -- claiming ----------------------------------------------------------------------------------------------------

    def due_ids(self, connection: Connection, *, limit: int, from_us: int = 0) -> list[str]:
        """Returns ids of due rows, the longest due first. A plain read: it locks nothing.

        The scan begins at the due time `from_us`: from the start it would pass all entries that InnoDB has not purged.
        """
        return [row[0] for row in self._due.run(connection, {"limit": limit, "from_us": from_us})]

    def due_rows(self, connection: Connection, *, limit: int, from_us: int = 0) -> DueRows:
        """Returns the same rows complete, as after their claim: with the attempt counted. They are not claimed yet."""
        fetched = [tuple(row) for row in self._due_whole.run(connection, {"limit": limit, "from_us": from_us})]
        rows = [outbox_row((*row[:-2], row[-1]), self.table, begun=1) for row in fetched]
        return DueRows(rows, fetched[-1][-2] if fetched else from_us)

    def claim(self, connection: Connection, ids: Sequence[str], *, token: str, lease_us: int, ahead_us: int = 0) -> int:
        """Claim the rows that are still due, or will be within `ahead_us`, with one compare-and-set; returns how many
        the token owns now.
        """
        values = {"token": token, "lease_us": lease_us, "ahead_us": ahead_us}
        return self._by_ids.count(connection, self._claim_statement, ids, **values)

    def claimed(self, connection: Connection, ids: Sequence[str], *, token: str) -> list[OutboxRow]:
        """Returns the rows among `ids` that this token owns, oldest first."""
        fetched = self._by_ids.rows(connection, self._claimed_statement, ids, token=token)
        return [outbox_row(row, self.table) for row in fetched]

    def barriers(self, connection: Connection, runs: Mapping[str, KeyRun]) -> dict[str, Barrier]:
        """Returns the barriers of these runs of ordered keys, which are to be sent; see OrderStore.barriers."""
        return self._order.barriers(connection, runs)

    def postpone(self, connection: Connection, ids: Sequence[str], *, due_at_us: int, first_seq: int) -> int:
        """Postpone due, unclaimed rows until this time, and by a microsecond at least; returns how many. For rows of
        ordered keys that must wait for an older message.

        They get due times in the order of their numbers, of which `first_seq` is the least, within one second:
        with equal ones they would be claimed in the order of ids, and the younger ones would have to wait again.
        """
        values = {"later_us": due_at_us, "first_seq": first_seq}
        return self._by_ids.count(connection, self._postpone_statement, ids, **values)

    # -- settling, each guarded by the token -------------------------------------------------------------------------

    def remove(
        self,
        connection: Connection,
        ids: Sequence[str],
        *,
        token: str,
        numbers: Mapping[str, tuple[str, int]] | None = None,
    ) -> int:
        """Delete rows that the broker accepted, or an operator discarded; returns how many this token still owned.
        `numbers`: the order keys and numbers of the ordered ones among them.
        """
        removed = self._by_ids.count(connection, self._remove_statement, ids, token=token)
        if numbers:
            # Another owner sends a row that this token lost: younger messages of its key still wait for it.
            message = self._message
            select_left = select(message.c.id).where(message.c.id.in_(sorted(numbers)))
            kept_ids = set(connection.scalars(select_left)) if removed < len(ids) else set()
            self._order.forget(
                connection, [key_and_number for row_id, key_and_number in numbers.items() if row_id not in kept_ids]
            )
        return removed

    def archive(self, connection: Connection, ids: Sequence[str], *, token: str, outcome: str) -> int:
        """Copy rows that this token still owns to the archive, for the reconciliation; call remove() afterwards."""
        return self._by_ids.count(connection, self._archive_statement, ids, token=token, outcome=outcome)

    def reschedule(self, connection: Connection, ids: Sequence[str], *, token: str, delay_us: int, error: str) -> int:
        """Release rows that could not be sent, due again after `delay_us`; returns how many this token still owned."""
        values = {"token": token, "delay_us": delay_us, "error": _error_text(error)}
        return self._by_ids.count(connection, self._reschedule_statement, ids, **values)

    def release(
        self, connection: Connection, ids: Sequence[str], *, token: str, delay_us: int, error: str | None
    ) -> int:
        """Release rows that did not cause the failure, due again after `delay_us`, and subtract the attempt that the
        claim counted; returns how many this token still owned. Without `error` the last one is kept.
        """
        values = {"token": token, "delay_us": delay_us, "error": None if error is None else _error_text(error)}
        return self._by_ids.count(connection, self._release_statement, ids, **values)

    def park(self, connection: Connection, ids: Sequence[str], *, token: str, error: str) -> int:
        """Park rows with the reason: the broker will never accept them as they are, and an operator must decide."""
        values = {"token": token, "error": _error_text(error)}
        return self._by_ids.count(connection, self._park_statement, ids, **values)

    # -- the statements, compiled ahead ------------------------------------------------------------------------------

    def _deliver_in_us(self) -> ColumnElement[int]:
        return self._message.c.deliver_at_ms * literal_column("1000", BigInteger()) - self._now_us

    def _prepared_due(self, *columns: str, also: Sequence[ColumnElement[Any]] = ()) -> HintedStatement:
        """Prepares a scan of the index (state, due_at_us, id) from a due time to now, which LIMIT ends early.

        A hint makes MySQL and MariaDB use the index: otherwise they sort a small table as a whole, or scan the index
        from its start and pass all entries that are not purged yet.
        """
        message = self._message
        from_us, limit = bindparam("from_us", type_=BigInteger()), bindparam("limit", type_=BigInteger())
        plain = (
            select(*(message.c[name] for name in columns), *also)
            .where(message.c.state == _PENDING, message.c.due_at_us.between(from_us, self._now_us))
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        hinted = along_due_index(plain, message, table=self.table.name, dialect=self._dialect)
        return HintedStatement(prepare(self._dialect, hinted), prepare(self._dialect, plain))

    def _claim_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        message, until_us = self._message, self._now_us + bindparam("ahead_us", type_=BigInteger())
        return self._by_key(
            update(message)
            .where(message.c.id.in_(ids), message.c.state == _PENDING, message.c.due_at_us <= until_us)
            .values(
                token=bindparam("token"),
                due_at_us=self._now_us + bindparam("lease_us", type_=BigInteger()),
                attempts=message.c.attempts + literal_column("1", BigInteger()),
            )
        )

    def _postpone_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        message, later_us = self._message, bindparam("later_us", type_=BigInteger())
        one_us, spread_us = literal_column("1", BigInteger()), literal_column(str(BEHIND_SPREAD_US), BigInteger())
        offset_us = message.c.order_seq - bindparam("first_seq", type_=BigInteger())
        spread = case((offset_us < spread_us, offset_us), else_=spread_us)
        return self._by_key(
            update(message)
            .where(message.c.id.in_(ids), message.c.state == _PENDING, message.c.due_at_us <= self._now_us)
            .values(
                token=null(),
                # A due time only ever increases: a compensator's low-water mark may be just after the previous one.
                due_at_us=case((message.c.due_at_us < later_us, later_us + spread), else_=message.c.due_at_us + one_us),
            )
        )

    def _claimed_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        message = self._message
        return (
            select(*(message.c[name] for name in _ROW_COLUMNS), self._deliver_in_us())
            .where(message.c.id.in_(ids), message.c.token == bindparam("token"))
            .order_by(message.c.created_at_us, message.c.id)
        )

    def _remove_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        return self._by_key(delete(self._message).where(*self._ours(ids)))

    def _archive_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        copied = [self._message.c[name] for name in ARCHIVED_COLUMNS]
        source = select(*copied, self._now_us, bindparam("outcome", type_=String(32))).where(*self._ours(ids))
        return insert(self.tables.archive).from_select([*ARCHIVED_COLUMNS, "sent_at_us", "outcome"], source)

    def _reschedule_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        due_at_us = self._now_us + bindparam("delay_us", type_=BigInteger())
        given_back = update(self._message).where(*self._ours(ids))
        return self._by_key(given_back.values(token=null(), due_at_us=due_at_us, last_error=bindparam("error")))

    def _release_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        attempts, error = self._message.c.attempts, self._message.c.last_error
        zero, one = (literal_column(digit, BigInteger()) for digit in ("0", "1"))
        return self._by_key(
            update(self._message)
            .where(*self._ours(ids))
            .values(
                token=null(),
                due_at_us=self._now_us + bindparam("delay_us", type_=BigInteger()),
                attempts=case((attempts > zero, attempts - one), else_=zero),
                last_error=func.coalesce(bindparam("error", type_=Text()), error),
            )
        )

    def _park_statement(self, ids: list[BindParameter[str]]) -> ClauseElement:
        aside = update(self._message).where(*self._ours(ids))
        return self._by_key(aside.values(state=_PARKED, token=null(), last_error=bindparam("error")))

    def _by_key(self, statement: Write) -> Write:
        return self._database.by_primary_key(statement, self._dialect)

    def _ours(self, ids: list[BindParameter[str]]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        return self._message.c.id.in_(ids), self._message.c.token == bindparam("token")

    # -- operators ---------------------------------------------------------------------------------------------------

    def backlog(self, connection: Connection, *, rows_max: int = 100_000) -> Backlog:
        """Returns the table's backlog; counts stop at `rows_max`, so that they never scan millions of rows."""
        hinted, plain = (
            prepare(self._dialect, self._backlog_statement(rows_max=rows_max, hint=hint))
            for hint in (self.table.name, None)
        )
        [row] = map(tuple[Any, ...], HintedStatement(hinted, plain).run(connection, {}))
        return Backlog(
            pending=row[0], due=row[1], retrying=row[2], parked=row[3], oldest_due_age_us=max(0, row[4] or 0)
        )

    def _backlog_statement(self, *, rows_max: int, hint: str | None) -> Select[Any]:
        message = self._message
        pending, parked = message.c.state == _PENDING, message.c.state == _PARKED
        due = pending & (message.c.due_at_us <= self._now_us)
        sample = sample_pending(message, pending, rows_max=rows_max, table=hint, dialect=self._dialect)
        return select(
            count_rows(message, pending, rows_max=rows_max),
            count_rows(message, due, rows_max=rows_max),
            retrying_rows(sample),
            count_rows(message, parked, rows_max=rows_max),
            oldest_wanted_age_us(sample, self._now_us),
        ).select_from(sample)


def outbox_row(row: Sequence[Any], table: MessageTable, *, begun: int = 0) -> OutboxRow:
    """Returns a result row of _ROW_COLUMNS and the time until its due time as a value, with `begun` more attempts."""
    (
        row_id, kind, topic, body, body_sha256, key, headers_json, deliver_at_ms, created_at_us, attempts,
        order_key, order_seq, deliver_in_us,
    ) = row  # fmt: skip
    return OutboxRow(
        id=row_id, kind=RowKind(kind), topic=topic, body=bytes(body), body_sha256=body_sha256, key=key,
        headers_json=headers_json, deliver_at_ms=deliver_at_ms, created_at_us=created_at_us, attempts=attempts + begun,
        order_key=order_key, order_seq=order_seq, deliver_in_us=deliver_in_us, table=table,
    )  # fmt: skip


def _error_text(error: str) -> str:
    """Returns a broker's text as a column takes it: else its row could never be settled."""
    return utf8_text(error)[:ERROR_CHARS_MAX]


@lru_cache(maxsize=16 * 1024)
def _store(dialect: Dialect, table: MessageTable) -> MessageStore:
    return MessageStore(dialect=dialect, schema=table.schema, table=table.name)


# -- the INSERT, within the server's limits ----------------------------------------------------------------------------

_ROWS_MAX: Final = 100
_BYTES_MAX: Final = 8 * 1024 * 1024
_PARAMETERS: Final = (
    "id", "kind", "lease", "token", "topic", "message_key", "headers", "body", "body_sha256", "deliver_at_ms", "place",
    "order_key", "order_seq",
)  # fmt: skip
_TIMED_PARAMETERS_IN_ORDER: Final = (*_PARAMETERS[:2], "due", *_PARAMETERS[2:4], "attempts", *_PARAMETERS[4:])
"""Those of a statement that has timed rows among others."""
_INTEGERS: Final = frozenset({"lease", "deliver_at_ms", "place", "order_seq", "due", "attempts"})


class RowInsert:
    """Inserts the rows that it is called with. Stateless except for compiled statements, so thread-safe."""

    def __init__(self, dialect: Dialect, table: MessageTable) -> None:
        self._dialect = dialect
        self._message = message_table(table.schema, table.name)
        self._database = database_of(dialect)
        self._prepared: dict[tuple[int, bool, RowState], PreparedStatement] = {}

    def __call__(
        self,
        connection: Connection,
        rows: Sequence[OutboxRow],
        *,
        token: str,
        lease_us: int,
        packet_bytes: int | None,
        state: RowState = RowState.PENDING,
    ) -> None:
        """`now` is equal for all rows of a statement: each gets a time one microsecond after the previous row's, so
        that due and creation times keep the order of a transaction's messages, whatever their ids are.

        A timed row belongs to nobody, and is due at its own time; one whose time has passed is due now: a due time in
        the past may be below the low-water mark of a compensator.
        """
        offsets_us = itertools.count()
        for chunk in _chunks(rows, packet_bytes):
            parameters: list[object] = []
            has_timed = any(row.is_timed for row in chunk)
            for row, offset_us in zip(chunk, offsets_us, strict=False):
                parameters += (row.id, row.kind.value)
                if has_timed:
                    parameters.append((row.deliver_at_ms or 0) * 1000 + offset_us if row.is_timed else None)
                parameters += (lease_us + offset_us, None if row.is_timed else token)
                if has_timed:
                    parameters.append(0 if row.is_timed else 1)
                parameters += (
                    row.topic, self._text(row.key),
                    self._text(row.headers_json), self._database.sent_body(row.body), row.body_sha256,
                    row.deliver_at_ms, offset_us, row.order_key, row.order_seq,
                )  # fmt: skip
            connection.exec_driver_sql(
                self._statement(len(chunk), has_timed=has_timed, state=state).sql, tuple(parameters)
            )

    def _text(self, text: str | None) -> str | None:
        return None if text is None else self._database.sent_text(text)

    def _statement(self, rows: int, *, has_timed: bool, state: RowState) -> PreparedStatement:
        """Returns the INSERT for this number of rows, compiled once: SQLAlchemy compiles multi-row VALUES each time."""
        if (rows, has_timed, state) not in self._prepared:
            values = [self._values(row_index, has_timed=has_timed, state=state) for row_index in range(rows)]
            prepared = prepare(self._dialect, insert(self._message).values(values))
            names = _TIMED_PARAMETERS_IN_ORDER if has_timed else _PARAMETERS
            if list(prepared.names) != [f"{name}_{row_index}" for row_index in range(rows) for name in names]:
                raise RuntimeError(f"SQLAlchemy bound the INSERT's parameters in an unexpected order: {prepared.names}")
            self._prepared[(rows, has_timed, state)] = prepared
        return self._prepared[(rows, has_timed, state)]

    def _values(self, row_index: int, *, has_timed: bool, state: RowState) -> dict[str, Any]:
        database, now = self._database, self._database.now_us()
        bound: dict[str, Any] = {
            name: bindparam(f"{name}_{row_index}", type_=BigInteger() if name in _INTEGERS else None)
            for name in _TIMED_PARAMETERS_IN_ORDER
        }
        leased_us = now + bound["lease"]
        return {
            "id": bound["id"],
            "kind": bound["kind"],
            "state": literal_column(f"'{state.value}'"),
            "due_at_us": func.coalesce(database.greatest(bound["due"], now), leased_us) if has_timed else leased_us,
            "token": bound["token"],
            # Attempts begun, of which the sender's after the commit is the first.
            "attempts": bound["attempts"] if has_timed else literal_column("1"),
            "topic": bound["topic"],
            "message_key": database.stored_text(bound["message_key"]),
            "headers": database.stored_text(bound["headers"]),
            "body": database.stored_body(bound["body"]),
            "body_sha256": bound["body_sha256"],
            "deliver_at_ms": bound["deliver_at_ms"],
            "created_at_us": now + bound["place"],
            "order_key": bound["order_key"],
            "order_seq": bound["order_seq"],
        }


def _chunks(rows: Sequence[OutboxRow], packet_bytes: int | None) -> list[Sequence[OutboxRow]]:
    """Splits rows by count and bytes, so that no statement exceeds the server's packet. A row above the limit is alone
    in its statement.
    """
    budget = min(_BYTES_MAX, packet_bytes or _BYTES_MAX) - STATEMENT_BYTES_MAX
    sizes = [row_bytes(row) for row in rows]
    if len(rows) <= _ROWS_MAX and sum(sizes) <= budget:
        return [rows]
    chunks: list[list[OutboxRow]] = []
    filled = budget + 1
    for row, size in zip(rows, sizes, strict=True):
        filled += size
        if filled > budget or len(chunks[-1]) >= _ROWS_MAX:
            chunks.append([])
            filled = size
        chunks[-1].append(row)
    return list(chunks)
