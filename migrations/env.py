"""Alembic's entry point: runs the revisions in this folder on the connection of outbox.migrate. Opens none itself."""

from __future__ import annotations

from alembic import context

from outbox.alembic import VERSION_TABLE
from outbox.store.schema import outbox_tables

connection = context.config.attributes["connection"]
schema: str | None = context.config.attributes["schema"]

context.configure(
    connection=connection,
    target_metadata=outbox_tables(schema).metadata,
    version_table=VERSION_TABLE,
    version_table_schema=schema,
    include_schemas=True,
    include_name=lambda name, kind, _: kind != "schema" or name == schema,
    transactional_ddl=False,
)
with context.begin_transaction():
    context.run_migrations()
