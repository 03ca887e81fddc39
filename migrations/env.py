"""Alembic's entry point: runs the revisions in this folder on the connection of outbox.migrate. Opens none itself."""

from __future__ import annotations

from alembic import context

from outbox.store.schema import outbox_tables
from outbox_core.common.table_namespace import VERSION_TABLE, TableNamespace

connection = context.config.attributes["connection"]
namespace: TableNamespace = context.config.attributes["namespace"]

context.configure(
    connection=connection,
    target_metadata=outbox_tables(namespace).metadata,
    version_table=VERSION_TABLE,
    version_table_schema=namespace.schema,
    include_schemas=True,
    include_name=lambda name, kind, _: kind != "schema" or name == namespace.schema,
    transactional_ddl=False,
)
with context.begin_transaction():
    context.run_migrations()
