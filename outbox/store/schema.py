"""Definitions of the outbox tables: message, archive, inbox, order, lease. No statements.

They are in the business's own database, where their names begin with `outbox_`, or in a schema of their own on its
server (MySQL and MariaDB), where they do not. Times are integers: microseconds since the Unix epoch by
the database's UTC clock (`_us`), or milliseconds as in the protocol (`_ms`), so that their meaning depends on no
session time zone, driver or daylight saving. A TIMESTAMP ends in 2038.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    FromClause,
    Index,
    Integer,
    MetaData,
    Select,
    Table,
    inspect,
)
from sqlalchemy.engine import Dialect

from outbox.store.databases.supported import (
    TABLE_OPTIONS,
    ascii_type,
    body_type,
    database_of,
    long_text_type,
    unicode_type,
)
from outbox_core.common.table_namespace import PREFIX, TableNamespace

TABLES_MAX: Final = 1024
_SPLIT_NAME: Final = re.compile(rf"({PREFIX})?message_[0-9]{{4}}")

# Text, since a business's own id (payment:17:completed) is the best guard against publishing twice, and any client can
# read it. BINARY(16) would save 16 bytes a row, and cost everybody who looks at the table a function call.
_ID = ascii_type(64)
_NAME = ascii_type(255)
_WORD = ascii_type(32)
_HASH = ascii_type(64)
_KEY = unicode_type(1024)
_DATABASE = unicode_type(64)
_TEXT = long_text_type()
_BODY = body_type()


class RowState(StrEnum):
    """The state of a row of the message table. Rows that the broker accepted are deleted (or in the archive)."""

    PENDING = "pending"
    PARKED = "parked"
    HELD = "held"
    """Written by a process under the pytest plugin, which must not send; no claim selects it, whoever makes it."""


PARKED_BY_HAND: Final = "parked by an operator"
"""With this begins the `last_error` of a row that an operator parked; behind it is the error that the row had."""


class RowKind(StrEnum):
    """The operation of a row: publish a message, or cancel one. Unknown: a kind that newer code has written."""

    PUBLISH = "publish"
    CANCEL = "cancel"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, _value: object) -> RowKind:
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class OutboxTables:
    """The tables of one schema, as SQLAlchemy's Table objects.

    `order_head` has the last allocated number of each ordered key, `order_queue` the numbers of unsent messages.
    `instance` has the live compensators, `lease` the compensator that serves each source. `identity` has one row: the
    random id of this database's tables, and the business's database to which a schema of its own belongs.
    """

    metadata: MetaData
    message: Table
    archive: Table
    inbox: Table
    order_head: Table
    order_queue: Table
    instance: Table
    lease: Table
    identity: Table


@lru_cache(maxsize=64)
def outbox_tables(namespace: TableNamespace) -> OutboxTables:
    """Returns the tables of a namespace."""
    metadata = MetaData(schema=namespace.schema)
    prefix = namespace.prefix
    return OutboxTables(
        metadata=metadata,
        message=_message_table(metadata, f"{prefix}message"),
        archive=_archive_table(metadata, prefix),
        inbox=_inbox_table(metadata, prefix),
        order_head=Table(
            f"{prefix}order_head",
            metadata,
            Column("order_key", _WORD, primary_key=True),
            Column("seq", BigInteger, nullable=False),
            **TABLE_OPTIONS,
        ),
        order_queue=Table(
            f"{prefix}order_queue",
            metadata,
            Column("order_key", _WORD, primary_key=True),
            Column("order_seq", BigInteger, primary_key=True, autoincrement=False),
            Column("message_id", _ID, nullable=False),
            **TABLE_OPTIONS,
        ),
        instance=Table(
            f"{prefix}compensator_instance",
            metadata,
            Column("id", _ID, primary_key=True),
            Column("zone", _ID, nullable=False),
            Column("started_at_us", BigInteger, nullable=False),
            Column("alive_until_us", BigInteger, nullable=False),
            **TABLE_OPTIONS,
        ),
        lease=Table(
            f"{prefix}compensator_lease",
            metadata,
            Column("source", _NAME, primary_key=True),
            Column("instance", _ID, nullable=True),
            Column("until_us", BigInteger, nullable=False),
            Column("epoch", BigInteger, nullable=False),
            **TABLE_OPTIONS,
        ),
        identity=Table(
            f"{prefix}identity",
            metadata,
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("id", _ID, nullable=False),
            Column("owner", _DATABASE, nullable=True),
            Column("is_shared", Boolean, nullable=False),
            **TABLE_OPTIONS,
        ),
    )


@lru_cache(maxsize=16 * 1024)
def message_table(schema: str | None, name: str) -> Table:
    """Returns one of the message tables of a namespace, by its whole name."""
    return _message_table(MetaData(schema=schema), name)


def plain_message_table_name(namespace: TableNamespace) -> str:
    """Returns the name of the message table that is not split."""
    return namespace.named("message")


def split_message_table_name(namespace: TableNamespace, table_number: int) -> str:
    """Returns the name of one of the tables that messages are split into by CRC32 of their keys (MySQL and MariaDB)."""
    return namespace.named(f"message_{table_number:04d}")


def along_due_index(statement: Select[Any], message: FromClause, *, table: str, dialect: Dialect) -> Select[Any]:
    """Returns a statement that scans the index (state, due_at_us, id), where the database can be told to."""
    return database_of(dialect).along_index(statement, message, _due_index_name(table), dialect)


def _due_index_name(table: str) -> str:
    return f"ix_{table}_state_due"


def message_table_names(connection: Connection, namespace: TableNamespace) -> list[str]:
    """Returns the names of a namespace's message tables, the split ones and the one that is not, sorted."""
    plain = plain_message_table_name(namespace)
    names = inspect(connection).get_table_names(schema=namespace.schema)
    return sorted(name for name in names if name == plain or (namespace.schema and _is_split(name, namespace)))


def _is_split(name: str, namespace: TableNamespace) -> bool:
    matched = _SPLIT_NAME.fullmatch(name)
    return matched is not None and (matched[1] or "") == namespace.prefix


def _message_table(metadata: MetaData, name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("id", _ID, primary_key=True),
        Column("kind", _WORD, nullable=False),
        Column("state", _WORD, nullable=False),
        Column("due_at_us", BigInteger, nullable=False),
        Column("token", _WORD, nullable=True),
        Column("attempts", Integer, nullable=False),
        Column("topic", _NAME, nullable=False),
        Column("message_key", _KEY, nullable=True),
        Column("headers", _TEXT, nullable=True),
        Column("body", _BODY, nullable=False, quote=True),  # reserved under sql_mode ORACLE
        Column("body_sha256", _HASH, nullable=False),
        Column("deliver_at_ms", BigInteger, nullable=True),
        Column("created_at_us", BigInteger, nullable=False),
        Column("last_error", _TEXT, nullable=True),
        Column("order_key", _WORD, nullable=True),
        Column("order_seq", BigInteger, nullable=True),
        # The claim scans this index in its order, so that LIMIT ends the scan: see MessageStore.due_rows.
        Index(_due_index_name(name), "state", "due_at_us", "id"),
        **TABLE_OPTIONS,
    )


def _archive_table(metadata: MetaData, prefix: str) -> Table:
    return Table(
        f"{prefix}archive",
        metadata,
        # sent_at_us leads the key, so that the archive can be partitioned, and dropped, by day.
        Column("sent_at_us", BigInteger, primary_key=True, autoincrement=False),
        Column("id", _ID, primary_key=True),
        Column("kind", _WORD, nullable=False),
        Column("topic", _NAME, nullable=False),
        Column("message_key", _KEY, nullable=True),
        Column("body_sha256", _HASH, nullable=False),
        Column("deliver_at_ms", BigInteger, nullable=True),
        Column("created_at_us", BigInteger, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("outcome", _WORD, nullable=False),
        Index(f"ix_{prefix}archive_id", "id"),
        Index(f"ix_{prefix}archive_created", "created_at_us"),
        **TABLE_OPTIONS,
    )


def _inbox_table(metadata: MetaData, prefix: str) -> Table:
    return Table(
        f"{prefix}inbox",
        metadata,
        Column("consumer_group", _NAME, primary_key=True),
        Column("topic", _NAME, primary_key=True),
        Column("message_id", _ID, primary_key=True),
        Column("handled_at_us", BigInteger, nullable=False),
        Index(f"ix_{prefix}inbox_handled", "handled_at_us"),
        **TABLE_OPTIONS,
    )
