"""Limits of a server: its largest statement, and whether its tables support transactions. A message's own limits are in
outbox_core.messages.limits.

Both are read on the connections that the business uses: after a failover the server may have other settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect

from outbox.store.database import ask_driver
from outbox.store.databases.supported import database_of
from outbox.store.row import OutboxRow
from outbox.store.table_placement import MessageTable
from outbox_core.common.errors import ConfigurationError, InvalidMessage

ROW_BYTES_MAX: Final = 2 * 1024
"""The bytes of one row in the INSERT: SQL, ids, topic, hash. Bodies, keys and headers are added to these."""
STATEMENT_BYTES_MAX: Final = 4 * 1024
"""The bytes of the INSERT before its rows."""
_PACKET_KEY: Final = "outbox.max_allowed_packet"


def row_bytes(row: OutboxRow) -> int:
    """Returns a row's most bytes in an INSERT: drivers write bytes as hex and escape quotes, so each counts twice."""
    return 2 * (len(row.body) + _utf8_bytes(row.key) + _utf8_bytes(row.headers_json)) + ROW_BYTES_MAX


class ServerLimits:
    """The limits of the server of one Outbox. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        """No I/O: limits are read on each new connection of `engine`."""
        self._packet_bytes: int | None = None
        self._sound: set[MessageTable] = set()
        self._driver_error = _driver_error(engine.dialect)
        query = database_of(engine.dialect).statement_bytes_query
        if query is not None:
            event.listen(engine, "connect", partial(self._connected, query))

    def refuse_early(self, row: OutboxRow) -> None:
        """Raise InvalidMessage for a row that is too large for an INSERT, if the server's limit is known. No I/O."""
        if self._packet_bytes is not None:
            _refuse_too_large(row, self._packet_bytes)

    def check(self, connection: Connection, rows: Sequence[OutboxRow], *, table: MessageTable) -> int | None:
        """Raise an error that must fail this connection's commit before the INSERT is tried; returns the limit of an
        INSERT in bytes, None without one. `table`: of rows that name none.

        The server would close the connection at a larger packet, and the caller would get only the driver's error.
        """
        database = database_of(connection.dialect)
        packet_bytes: int | None = None
        if database.statement_bytes_query is not None:
            packet_bytes = self._packet_bytes_of(connection, database.statement_bytes_query)
        if packet_bytes is not None:
            for row in rows:
                _refuse_too_large(row, packet_bytes)
        if database.storage_engine_query is not None:
            for table in {row.table or table for row in rows} - self._sound:
                self._refuse_without_transactions(connection, table, query=database.storage_engine_query)
        return packet_bytes

    def _packet_bytes_of(self, connection: Connection, query: str) -> int | None:
        """Returns the limit as read on this connection, which may be older than this Outbox, or another engine's."""
        info = connection.info
        if _PACKET_KEY not in info:
            for (max_allowed_packet,) in _ask(connection, query):
                info[_PACKET_KEY] = self._packet_bytes = int(max_allowed_packet)
        packet_bytes: int | None = info.get(_PACKET_KEY)
        return packet_bytes

    def _connected(self, query: str, connection: Any, record: Any) -> None:
        """Read the limits on a new connection, without SQLAlchemy, so that no transaction begins."""
        if _PACKET_KEY not in record.info:
            with suppress(self._driver_error), closing(connection.cursor()) as cursor:
                cursor.execute(query)
                for (max_allowed_packet,) in cursor.fetchall():
                    record.info[_PACKET_KEY] = int(max_allowed_packet)
        self._packet_bytes = record.info.get(_PACKET_KEY, self._packet_bytes)

    def _refuse_without_transactions(self, connection: Connection, table: MessageTable, *, query: str) -> None:
        for engine, transactions in _ask(connection, query, table.schema, table.name):
            if transactions != "YES":
                raise ConfigurationError(
                    f"{table.schema}.{table.name} is on the storage engine {engine}, which keeps no transactions: a "
                    "message would stay although its business transaction rolled back; run: "
                    f"ALTER TABLE {table.schema}.{table.name} ENGINE=InnoDB"
                )
            self._sound.add(table)


def _ask(connection: Connection, question: str, *parameters: str | None) -> Sequence[tuple[Any, ...]]:
    """Returns no rows if the query fails: the next statement on the connection will report the cause. A lost connection
    is reported here.
    """
    with suppress(_driver_error(connection.dialect)):
        return ask_driver(connection, question, *parameters)
    return []


def _driver_error(dialect: Dialect) -> type[Exception]:
    error_class: type[Exception] = dialect.loaded_dbapi.Error
    return error_class


def _refuse_too_large(row: OutboxRow, packet_bytes: int) -> None:
    needed = STATEMENT_BYTES_MAX + row_bytes(row)
    if needed > packet_bytes:
        raise InvalidMessage(
            f"message {row.id} needs up to {needed:,} bytes of an INSERT (its body of {len(row.body):,} bytes counts "
            f"twice there), more than the server's max_allowed_packet of {packet_bytes:,}; raise that, or store the "
            "body elsewhere and publish a reference"
        )


def _utf8_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())
