"""Creates the tables: message, archive, inbox, order, leases, identity.

Revision: 0001
Follows: nothing
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import context, op

from outbox.migrate import idempotent_ddl as steps
from outbox.store.databases.supported import TABLE_OPTIONS, ascii_type, body_type, long_text_type, unicode_type

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A revision that was released must not change: it defines its tables itself and never imports the current definitions.
# What a type is on each database stands in that database's file, and must not change there without a revision either.
_ID = ascii_type(64)
_NAME = ascii_type(255)
_WORD = ascii_type(32)
_KEY = unicode_type(1024)
_DATABASE = unicode_type(64)
_TEXT = long_text_type()
_BODY = body_type()
_TABLES = (
    "message", "archive", "inbox", "order_head", "order_queue", "compensator_instance", "compensator_lease", "identity",
)  # fmt: skip


def upgrade() -> None:
    """Create the tables and their indexes, and the row that says which database this is."""
    namespace = context.config.attributes["namespace"]
    _create_message_table(namespace.schema, namespace.prefix)
    _create_archive_and_inbox(namespace.schema, namespace.prefix)
    _create_order_tables(namespace.schema, namespace.prefix)
    _create_compensator_tables(namespace.schema, namespace.prefix)
    _create_identity(namespace.schema, namespace.prefix)


def downgrade() -> None:
    """Drop the tables, and every unsent message with them."""
    namespace = context.config.attributes["namespace"]
    for name in reversed(_TABLES):
        steps.drop_table(f"{namespace.prefix}{name}", schema=namespace.schema)


def _create_message_table(schema: str | None, prefix: str) -> None:
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
        sa.Column("order_key", _WORD, nullable=True),
        sa.Column("order_seq", sa.BigInteger, nullable=True),
        schema=schema,
        **TABLE_OPTIONS,
    )
    steps.create_index(f"ix_{prefix}message_state_due", f"{prefix}message", ["state", "due_at_us", "id"], schema=schema)


def _create_archive_and_inbox(schema: str | None, prefix: str) -> None:
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
        **TABLE_OPTIONS,
    )
    steps.create_index(f"ix_{prefix}archive_id", f"{prefix}archive", ["id"], schema=schema)
    steps.create_index(f"ix_{prefix}archive_created", f"{prefix}archive", ["created_at_us"], schema=schema)
    # A message is identified by its topic and id.
    steps.create_table(
        f"{prefix}inbox",
        sa.Column("consumer_group", _NAME, primary_key=True),
        sa.Column("topic", _NAME, primary_key=True),
        sa.Column("message_id", _ID, primary_key=True),
        sa.Column("handled_at_us", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )
    steps.create_index(f"ix_{prefix}inbox_handled", f"{prefix}inbox", ["handled_at_us"], schema=schema)


def _create_order_tables(schema: str | None, prefix: str) -> None:
    steps.create_table(
        f"{prefix}order_head",
        sa.Column("order_key", _WORD, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )
    steps.create_table(
        f"{prefix}order_queue",
        sa.Column("order_key", _WORD, primary_key=True),
        sa.Column("order_seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("message_id", _ID, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def _create_compensator_tables(schema: str | None, prefix: str) -> None:
    steps.create_table(
        f"{prefix}compensator_instance",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("zone", _ID, nullable=False),
        sa.Column("started_at_us", sa.BigInteger, nullable=False),
        sa.Column("alive_until_us", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )
    steps.create_table(
        f"{prefix}compensator_lease",
        sa.Column("source", _NAME, primary_key=True),
        sa.Column("instance", _ID, nullable=True),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )


def _create_identity(schema: str | None, prefix: str) -> None:
    """Create the table with its row; the row's number keeps a second upgrade from writing another id."""
    name = f"{prefix}identity"
    steps.create_table(
        name,
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("id", _ID, nullable=False),
        sa.Column("owner", _DATABASE, nullable=True),
        sa.Column("is_shared", sa.Boolean, nullable=False),
        schema=schema,
        **TABLE_OPTIONS,
    )
    columns = (sa.column("number", sa.Integer), sa.column("id", sa.String), sa.column("is_shared", sa.Boolean))
    identity = sa.table(name, *columns, schema=schema)
    if steps.is_offline():
        # The script may be run on several databases, and each has an id of its own.
        op.execute(identity.insert().values(number=1, id=_random_id(op.get_context().dialect.name), is_shared=False))
    elif op.get_bind().scalar(sa.select(identity.c.id)) is None:
        op.execute(identity.insert().values(number=1, id=secrets.token_hex(16), is_shared=False))


def _random_id(dialect_name: str) -> sa.ColumnElement[str]:
    """Returns 32 hexadecimal digits that the database chooses."""
    if dialect_name == "sqlite":
        return sa.func.lower(sa.func.hex(sa.func.randomblob(16)))
    return sa.func.replace(sa.func.uuid(), "-", "")
