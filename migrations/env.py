"""Alembic's entry point: runs the revisions in this folder on the connection of outbox.migrate. Opens none itself.

Without a connection it writes their statements for the database of a URL, to which nothing connects.
"""

from __future__ import annotations

from typing import Any

from alembic import context

from outbox.store.schema import outbox_tables
from outbox_core.common.table_namespace import VERSION_TABLE, TableNamespace

attributes: dict[str, Any] = context.config.attributes
target: dict[str, Any] = (
    # The statements are read by people and other clients: no per cent sign is doubled for a driver.
    {"url": attributes["url"], "dialect_opts": {"paramstyle": "named"}, "literal_binds": True}
    if context.is_offline_mode()
    else {"connection": attributes["connection"]}
)
namespace: TableNamespace = attributes["namespace"]

context.configure(
    **target,
    target_metadata=outbox_tables(namespace).metadata,
    version_table=VERSION_TABLE,
    version_table_schema=namespace.schema,
    include_schemas=True,
    include_name=lambda name, kind, _: kind != "schema" or name == namespace.schema,
    transactional_ddl=False,
)
with context.begin_transaction():
    context.run_migrations()
