"""Creates the table that says which database this is, and to whom a schema of its own belongs.

Revision: 0004
Follows: 0003
"""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa
from alembic import context, op
from sqlalchemy.dialects import mysql

from outbox.migrate import idempotent_ddl as steps

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_MYSQL: dict[str, Any] = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}
_ID = sa.String(64).with_variant(mysql.VARCHAR(64, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
_DATABASE = sa.String(64).with_variant(
    mysql.VARCHAR(64, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)


def upgrade() -> None:
    """Create the table with its row; the row's number keeps a second upgrade from writing another id."""
    place = context.config.attributes["place"]
    name = f"{place.prefix}identity"
    steps.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("id", _ID, nullable=False),
        sa.Column("owner", _DATABASE, nullable=True),
        sa.Column("is_shared", sa.Boolean, nullable=False),
        schema=place.schema,
        **_MYSQL,
    )
    columns = (sa.column("number", sa.Integer), sa.column("id", sa.String), sa.column("is_shared", sa.Boolean))
    identity = sa.table(name, *columns, schema=place.schema)
    if op.get_bind().scalar(sa.select(identity.c.id)) is None:
        op.execute(identity.insert().values(number=1, id=secrets.token_hex(16), is_shared=False))


def downgrade() -> None:
    """Drop the table."""
    place = context.config.attributes["place"]
    steps.drop_table(f"{place.prefix}identity", schema=place.schema)
