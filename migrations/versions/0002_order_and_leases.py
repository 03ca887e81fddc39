"""Adds two columns and two tables for order per key, and two tables for compensators that share sources.

Revision: 0002
Follows: 0001
Code of revision 0001 works with it: the columns are nullable, the tables are new.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import context
from sqlalchemy.dialects import mysql

from outbox.migrate import idempotent_ddl as steps

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

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


def upgrade() -> None:
    """Add the columns to the message table, create the tables."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    steps.add_column(f"{prefix}message", sa.Column("order_key", _WORD, nullable=True), schema=schema)
    steps.add_column(f"{prefix}message", sa.Column("order_seq", sa.BigInteger, nullable=True), schema=schema)
    steps.create_table(
        f"{prefix}order_head",
        sa.Column("order_key", _WORD, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        schema=schema,
        **_MYSQL,
    )
    steps.create_table(
        f"{prefix}order_queue",
        sa.Column("order_key", _WORD, primary_key=True),
        sa.Column("order_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("message_id", _ID, nullable=False),
        schema=schema,
        **_MYSQL,
    )
    steps.create_table(
        f"{prefix}compensator_instance",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("zone", _ID, nullable=False),
        sa.Column("started_at_us", sa.BigInteger, nullable=False),
        sa.Column("alive_until_us", sa.BigInteger, nullable=False),
        schema=schema,
        **_MYSQL,
    )
    steps.create_table(
        f"{prefix}compensator_lease",
        sa.Column("source", _NAME, primary_key=True),
        sa.Column("instance", _ID, nullable=True),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        schema=schema,
        **_MYSQL,
    )


def downgrade() -> None:
    """Drop the columns and tables; the order of unsent messages is lost with them."""
    place = context.config.attributes["place"]
    schema, prefix = place.schema, place.prefix
    for name in ("compensator_lease", "compensator_instance", "order_queue", "order_head"):
        steps.drop_table(f"{prefix}{name}", schema=schema)
    steps.drop_column(f"{prefix}message", "order_seq", schema=schema)
    steps.drop_column(f"{prefix}message", "order_key", schema=schema)
