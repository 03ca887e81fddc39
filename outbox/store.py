"""The message table's SQL, all of it: insert, claim, settle, count. It opens no connection and commits nothing.

Every write after the insert is guarded by the row's token, never by the id alone: who lost the lease changes nothing.
Every locking statement names rows by primary key, in sorted order: no gap is locked that a producer's INSERT needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from sqlalchemy import (
    BigInteger,
    Connection,
    Row,
    Select,
    String,
    Table,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.engine import Dialect

from outbox.database import now_us
from outbox.ordering import Barrier, OrderStore, Run
from outbox.placement import MessageTable
from outbox.row import OutboxRow
from outbox.schema import (
    OutboxTables,
    RowKind,
    RowState,
    message_table,
    outbox_tables,
    plain_message_table_name,
    schema_for,
)

ERROR_CHARS_MAX: Final = 1024
_INSERT_ROWS_MAX: Final = 100
_INSERT_BYTES_MAX: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How a message table stands: rows that wait, rows that are due and not leased, parked rows, age of the
    oldest due.
    """

    pending: int
    due: int
    parked: int
    oldest_due_age_us: int


class MessageStore:
    """The statements on one set of outbox tables, for one dialect. Stateless, so safe in any thread."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None, table: str | None = None) -> None:
        """`table`: which of the schema's message tables; the plain one by default."""
        self._dialect = dialect
        actual = schema_for(dialect, schema)
        self.table = MessageTable(actual, table or plain_message_table_name(actual))
        self.tables: OutboxTables = outbox_tables(actual)
        self._message = message_table(actual, self.table.name)
        self._archive = self.tables.archive
        self._order = OrderStore(dialect=dialect, schema=actual)
        self._now_us = now_us(dialect)

    def at(self, table: MessageTable | None) -> MessageStore:
        """The store of another message table on the same database; of this one for None."""
        if table is None or table == self.table:
            return self
        return _store(self._dialect, table)

    # -- the business transaction ------------------------------------------------------------------------------------

    def insert(
        self, connection: Connection, rows: Sequence[OutboxRow], *, token: str, lease_us: int
    ) -> Sequence[OutboxRow]:
        """Write rows that this token owns until now + lease, by as few multi-row INSERTs as the bounds allow
        (one, mostly). Returns them as written: those of ordered keys have got their numbers.

        All rows of a statement see one `now`: each is written a microsecond after the one before it, so that the
        messages of a transaction keep their order in due and creation times, whatever their ids are.
        """
        ordered = any(row.order_key is not None for row in rows)
        if ordered:
            rows = self._order.number(connection, rows)
            self._order.enqueue(connection, rows)
        places_us = itertools.count()
        for chunk in _chunks(rows):
            parameters: list[object] = []
            for row, place_us in zip(chunk, places_us, strict=False):
                parameters += (
                    row.id, row.kind.value, lease_us + place_us, token, row.topic, row.key, row.headers_json,
                    row.body, row.body_sha256, row.deliver_at_ms, place_us, row.order_key, row.order_seq,
                )  # fmt: skip
            connection.exec_driver_sql(_insert_sql(self._dialect, self.table, len(chunk)), tuple(parameters))
        return rows

    # -- claiming ----------------------------------------------------------------------------------------------------

    def due_ids(self, connection: Connection, *, limit: int) -> list[str]:
        """Ids of rows whose due time has come, the longest due first. A plain read: it locks nothing."""
        message = self._message
        statement = (
            select(message.c.id)
            .where(message.c.state == RowState.PENDING, message.c.due_at_us <= self._now_us)
            .order_by(message.c.state, message.c.due_at_us, message.c.id)
            .limit(limit)
        )
        return list(connection.scalars(statement))

    def claim(self, connection: Connection, ids: Sequence[str], *, token: str, lease_us: int) -> int:
        """Take the lease of those rows that are still due, by one compare-and-set; returns how many are ours now."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)))
            .where(message.c.state == RowState.PENDING, message.c.due_at_us <= self._now_us)
            .values(token=token, due_at_us=self._now_us + lease_us, attempts=message.c.attempts + 1)
        )
        return connection.execute(statement).rowcount

    def claimed(self, connection: Connection, ids: Sequence[str], *, token: str) -> list[OutboxRow]:
        """The rows among `ids` that this token owns, oldest first."""
        message = self._message
        statement = (
            _row_columns(message)
            .where(message.c.id.in_(sorted(ids)), message.c.token == token)
            .order_by(message.c.created_at_us, message.c.id)
        )
        return [outbox_row(row, self.table) for row in connection.execute(statement)]

    def barriers(self, connection: Connection, runs: Mapping[str, Run]) -> dict[str, Barrier]:
        """What the runs of ordered keys that somebody wants to send must wait for; see OrderStore.barriers."""
        return self._order.barriers(connection, self._message, runs)

    # -- settling, each guarded by the token -------------------------------------------------------------------------

    def remove(
        self,
        connection: Connection,
        ids: Sequence[str],
        *,
        token: str,
        numbers: Mapping[str, tuple[str, int]] | None = None,
    ) -> int:
        """Delete rows that the broker accepted; returns how many were still ours. `numbers` are the order keys and
        numbers of those ids that have some.
        """
        message = self._message
        statement = delete(message).where(message.c.id.in_(sorted(ids)), message.c.token == token)
        removed = connection.execute(statement).rowcount
        if numbers:
            # A row that was not ours any more is somebody else's to send: what is younger waits for that.
            left = select(message.c.id).where(message.c.id.in_(sorted(numbers)))
            kept = set(connection.scalars(left)) if removed < len(ids) else set()
            self._order.forget(connection, [number for id_, number in numbers.items() if id_ not in kept])
        return removed

    def archive(self, connection: Connection, ids: Sequence[str], *, token: str, outcome: str) -> int:
        """Copy rows that are still ours into the archive, as evidence for reconciliation; remove() is to follow."""
        message = self._message
        copied = ["id", "kind", "topic", "message_key", "body_sha256", "deliver_at_ms", "created_at_us", "attempts"]
        source = select(
            *(message.c[name] for name in copied),
            self._now_us.label("sent_at_us"),
            literal(outcome, String(32)).label("outcome"),
        ).where(message.c.id.in_(sorted(ids)), message.c.token == token)
        return connection.execute(
            insert(self._archive).from_select([*copied, "sent_at_us", "outcome"], source)
        ).rowcount

    def reschedule(
        self, connection: Connection, ids: Sequence[str], *, token: str, delay_us: int, error: str | None, tried: bool
    ) -> int:
        """Give rows back, due again after `delay_us`; returns how many were still ours.

        `tried` False takes the attempt back that the claim counted: the row was not at fault. Without `error` the last
        one stays.
        """
        message = self._message
        values: dict[str, Any] = {"token": null(), "due_at_us": self._now_us + delay_us}
        if not tried:
            values["attempts"] = case((message.c.attempts > 0, message.c.attempts - 1), else_=0)
        if error is not None:
            values["last_error"] = error[:ERROR_CHARS_MAX]
        statement = update(message).where(message.c.id.in_(sorted(ids)), message.c.token == token).values(values)
        return connection.execute(statement).rowcount

    def park(self, connection: Connection, ids: Sequence[str], *, token: str, error: str) -> int:
        """Set rows aside with the reason: the broker will never take them as they are, people must look."""
        message = self._message
        statement = (
            update(message)
            .where(message.c.id.in_(sorted(ids)), message.c.token == token)
            .values(state=RowState.PARKED, token=null(), last_error=error[:ERROR_CHARS_MAX])
        )
        return connection.execute(statement).rowcount

    # -- people ------------------------------------------------------------------------------------------------------

    def backlog(self, connection: Connection, *, rows_max: int = 100_000) -> Backlog:
        """How the table stands; counts stop at `rows_max`, so that the figure never costs a walk over millions."""
        message = self._message
        pending = message.c.state == RowState.PENDING
        due = pending & (message.c.due_at_us <= self._now_us)

        def bounded(condition: Any) -> Any:
            inner = select(literal(1)).select_from(message).where(condition).limit(rows_max).subquery()
            return select(func.count()).select_from(inner).scalar_subquery()

        oldest = select(func.min(message.c.due_at_us)).where(due).scalar_subquery()
        row = connection.execute(
            select(bounded(pending), bounded(due), bounded(message.c.state == RowState.PARKED), self._now_us - oldest)
        ).one()
        return Backlog(pending=row[0], due=row[1], parked=row[2], oldest_due_age_us=max(0, row[3] or 0))


def outbox_row(row: Row[Any], table: MessageTable) -> OutboxRow:
    """A result row of a message table as a value."""
    values = row._mapping  # noqa: SLF001 - public, by SQLAlchemy's documentation
    return OutboxRow(
        id=values["id"],
        kind=RowKind(values["kind"]),
        topic=values["topic"],
        body=bytes(values["body"]),
        body_sha256=values["body_sha256"],
        key=values["message_key"],
        headers_json=values["headers"],
        deliver_at_ms=values["deliver_at_ms"],
        created_at_us=values["created_at_us"],
        attempts=values["attempts"],
        order_key=values["order_key"],
        order_seq=values["order_seq"],
        table=table,
    )


@lru_cache(maxsize=16 * 1024)
def _store(dialect: Dialect, table: MessageTable) -> MessageStore:
    return MessageStore(dialect=dialect, schema=table.schema, table=table.name)


def _row_columns(message: Table) -> Select[Any]:
    names = (
        "id", "kind", "topic", "body", "body_sha256", "message_key", "headers", "deliver_at_ms", "created_at_us",
        "attempts", "order_key", "order_seq",
    )  # fmt: skip
    return select(*(message.c[name] for name in names))


def _chunks(rows: Sequence[OutboxRow]) -> list[Sequence[OutboxRow]]:
    """Split so that no statement outgrows max_allowed_packet: by count, and by bytes of bodies."""
    if len(rows) <= _INSERT_ROWS_MAX and sum(len(row.body) for row in rows) <= _INSERT_BYTES_MAX:
        return [rows]
    chunks: list[list[OutboxRow]] = []
    size = _INSERT_BYTES_MAX + 1
    for row in rows:
        size += len(row.body)
        if size > _INSERT_BYTES_MAX or len(chunks[-1]) >= _INSERT_ROWS_MAX:
            chunks.append([])
            size = len(row.body)
        chunks[-1].append(row)
    return list(chunks)


@lru_cache(maxsize=4096)
def _insert_sql(dialect: Dialect, table: MessageTable, rows: int) -> str:
    """The multi-row INSERT for so many rows, compiled once: SQLAlchemy would compile multi-row VALUES each time."""
    message = message_table(table.schema, table.name)
    now = now_us(dialect)
    names = (
        "id", "kind", "lease", "token", "topic", "message_key", "headers", "body", "body_sha256", "deliver_at_ms",
        "place", "order_key", "order_seq",
    )  # fmt: skip
    values = []
    for number in range(rows):
        bound = {name: bindparam(f"{name}_{number}", type_=_bind_type(name)) for name in names}
        values.append(
            {
                "id": bound["id"],
                "kind": bound["kind"],
                "state": literal_column(f"'{RowState.PENDING.value}'"),
                "due_at_us": now + bound["lease"],
                "token": bound["token"],
                # Tries begun, of which the sender's own after the commit is the first.
                "attempts": literal_column("1"),
                "topic": bound["topic"],
                "message_key": bound["message_key"],
                "headers": bound["headers"],
                "body": bound["body"],
                "body_sha256": bound["body_sha256"],
                "deliver_at_ms": bound["deliver_at_ms"],
                "created_at_us": now + bound["place"],
                "order_key": bound["order_key"],
                "order_seq": bound["order_seq"],
            }
        )
    # exec_driver_sql takes a tuple of parameters, which every driver of ours understands in its positional style.
    positional = cast("Any", type(dialect))(paramstyle="qmark" if dialect.name == "sqlite" else "format")
    compiled = insert(message).values(values).compile(dialect=positional)
    expected = [f"{name}_{number}" for number in range(rows) for name in names]
    if list(compiled.positiontup or ()) != expected:
        raise RuntimeError(f"SQLAlchemy bound the INSERT's parameters in an unexpected order: {compiled.positiontup}")
    return str(compiled)


def _bind_type(name: str) -> Any:
    return BigInteger() if name in {"lease", "deliver_at_ms", "place", "order_seq"} else None
