"""Creates the message table, the archive and the inbox.

Revision: 0001
Follows: nothing
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context
from sqlalchemy.dialects import mysql

from outbox.migrate import idempotent_ddl as steps

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A revision must not change: it defines its tables itself and never imports the current definitions.
_MYSQL: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def _ascii(length: int) -> sa.types.TypeEngine[str]:
    exact = mysql.VARCHAR(length, charset="ascii", collation="ascii_bin")
    return sa.String(length).with_variant(exact, "mysql", "mariadb")


_ID = _ascii(64)
_NAME = _ascii(255)
_WORD = _ascii(32)
_KEY = sa.String(1024).with_variant(mysql.VARCHAR(1024, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
_BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def upgrade() -> None:
    """Create the three tables and their indexes."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    steps.create_table(
        f"{prefix}message",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("kind", _WORD, nullable=False),
        sa.Column("state", _WORD, nullable=False),
        sa.Column("due_at_us", sa.BigInteger, nullable=False),
        sa.Column("token", _WORD, nullable=True),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("topic", _NAME, nullable=False),
        sa.Column("message_key", _KEY, nullable=True),
        sa.Column("headers", _TEXT, nullable=True),
        sa.Column("body", _BODY, nullable=False, quote=True),  # reserved under sql_mode ORACLE
        sa.Column("body_sha256", _ID, nullable=False),
        sa.Column("deliver_at_ms", sa.BigInteger, nullable=True),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
        sa.Column("last_error", _TEXT, nullable=True),
        schema=schema,
        **_MYSQL,
    )
    steps.create_index(f"ix_{prefix}message_state_due", f"{prefix}message", ["state", "due_at_us", "id"], schema=schema)
    steps.create_table(
        f"{prefix}archive",
        sa.Column("sent_at_us", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", _ID, primary_key=True),
        sa.Column("kind", _WORD, nullable=False),
        sa.Column("topic", _NAME, nullable=False),
        sa.Column("message_key", _KEY, nullable=True),
        sa.Column("body_sha256", _ID, nullable=False),
        sa.Column("deliver_at_ms", sa.BigInteger, nullable=True),
        sa.Column("created_at_us", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("outcome", _WORD, nullable=False),
        schema=schema,
        **_MYSQL,
    )
    steps.create_index(f"ix_{prefix}archive_id", f"{prefix}archive", ["id"], schema=schema)
    steps.create_index(f"ix_{prefix}archive_created", f"{prefix}archive", ["created_at_us"], schema=schema)
    steps.create_table(
        f"{prefix}inbox",
        sa.Column("consumer_group", _NAME, primary_key=True),
        sa.Column("message_id", _ID, primary_key=True),
        sa.Column("topic", _NAME, nullable=False),
        sa.Column("handled_at_us", sa.BigInteger, nullable=False),
        schema=schema,
        **_MYSQL,
    )
    steps.create_index(f"ix_{prefix}inbox_handled", f"{prefix}inbox", ["handled_at_us"], schema=schema)


def downgrade() -> None:
    """Drop the three tables, and every unsent message with them."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    for name in ("inbox", "archive", "message"):
        steps.drop_table(f"{prefix}{name}", schema=schema)
