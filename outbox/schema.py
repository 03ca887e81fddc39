"""The tables of the outbox: message, archive, inbox. Their definition; who reads and writes them is elsewhere.

On MySQL and MariaDB they stand in a schema (database) of their own on the business's instance, `outbox` unless told
otherwise; on SQLite, which has no schemas, their names begin with `outbox_`. Times are integers, microseconds since the
Unix epoch by the database's UTC clock (`_us`) or milliseconds where the protocol uses them (`_ms`): no session time
zone, no driver and no daylight saving can change what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Dialect

DEFAULT_SCHEMA = "outbox"

_ID = String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_NAME = String(255).with_variant(mysql.VARCHAR(255, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_WORD = String(32).with_variant(mysql.VARCHAR(32, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_HASH = String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_KEY = String(1024).with_variant(mysql.VARCHAR(1024, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_TEXT = Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_BODY = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
_MYSQL_OPTIONS: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


class RowState(StrEnum):
    """What a row of the message table is. A row that was accepted by the broker is gone (or in the archive)."""

    PENDING = "pending"
    PARKED = "parked"


class RowKind(StrEnum):
    """What the broker is asked to do for a row: take a message, or cancel one."""

    PUBLISH = "publish"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class OutboxTables:
    """The tables, as SQLAlchemy knows them, under one schema."""

    metadata: MetaData
    message: Table
    archive: Table
    inbox: Table


@lru_cache(maxsize=64)
def outbox_tables(schema: str | None) -> OutboxTables:
    """The tables in `schema`; None (SQLite) gives them the prefix `outbox_` instead."""
    metadata = MetaData(schema=schema)
    prefix = "" if schema else "outbox_"
    message = Table(
        f"{prefix}message",
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
        Column("body", _BODY, nullable=False),
        Column("body_sha256", _HASH, nullable=False),
        Column("deliver_at_ms", BigInteger, nullable=True),
        Column("created_at_us", BigInteger, nullable=False),
        Column("last_error", _TEXT, nullable=True),
        # The claim walks this index in its own order, so that LIMIT stops the walk: see MessageStore.due_ids.
        Index(f"ix_{prefix}message_state_due", "state", "due_at_us", "id"),
        **_MYSQL_OPTIONS,
    )
    archive = Table(
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
        **_MYSQL_OPTIONS,
    )
    inbox = Table(
        f"{prefix}inbox",
        metadata,
        Column("consumer_group", _NAME, primary_key=True),
        Column("message_id", _ID, primary_key=True),
        Column("topic", _NAME, nullable=False),
        Column("handled_at_us", BigInteger, nullable=False),
        Index(f"ix_{prefix}inbox_handled", "handled_at_us"),
        **_MYSQL_OPTIONS,
    )
    return OutboxTables(metadata=metadata, message=message, archive=archive, inbox=inbox)


def schema_for(dialect: Dialect, schema: str | None) -> str | None:
    """The schema that applies on this dialect: None on SQLite, else the one asked for."""
    return None if dialect.name == "sqlite" else (schema or DEFAULT_SCHEMA)
