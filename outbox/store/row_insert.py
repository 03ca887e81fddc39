"""RowInsert: inserts rows into one message table, within the server's limits. Commits nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, bindparam, func, insert, literal_column
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import database_of
from outbox.store.prepared_statements import PreparedStatement, prepare
from outbox.store.row import OutboxRow
from outbox.store.schema import RowState, message_table
from outbox.store.server_limits import STATEMENT_BYTES_MAX, row_bytes
from outbox.store.table_placement import MessageTable

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
