"""Excludes the outbox tables from `alembic revision --autogenerate` in a project's own alembic tree.

Autogenerate compares the database with the project's metadata, and drops tables that exist only in the database: ours,
and every unsent message with them. This module is a plugin of alembic's, which is active once installed. Only where
`autogenerate_plugins` lists plugins explicitly, env.py needs one line:

    context.configure(..., include_object=outbox.alembic.include_object)
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Table

from outbox_core.common.table_namespace import PREFIX, VERSION_TABLE

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

_SPLIT_MESSAGE: Final = re.compile(r"message_[0-9]{4}")
_COLUMNS: Final = {
    "message": {"id", "kind", "state", "due_at_us", "token", "body_sha256"},
    "archive": {"id", "kind", "sent_at_us", "body_sha256", "outcome"},
    "inbox": {"consumer_group", "message_id", "handled_at_us"},
    "order_head": {"order_key", "seq"},
    "order_queue": {"order_key", "order_seq", "message_id"},
    "compensator_instance": {"id", "zone", "alive_until_us"},
    "compensator_lease": {"source", "instance", "until_us", "epoch"},
    "identity": {"number", "id"},
}
"""Columns that distinguish our tables, of any revision, from a project's tables of the same names."""


def is_outbox_table(table: Table) -> bool:
    """Returns whether a reflected table is one of the outbox's, in any schema."""
    return is_of_outbox(str(table.name), table.columns.keys())


def is_of_outbox(name: str, columns: Collection[str]) -> bool:
    """Returns whether a table with this name and these columns is one of the outbox's."""
    if name == VERSION_TABLE:
        return True
    plain = name.removeprefix(PREFIX)
    expected = _COLUMNS.get("message" if _SPLIT_MESSAGE.fullmatch(plain) else plain)
    return expected is not None and expected <= set(columns)


def include_object(item: Any, _name: str | None, type_: str, reflected: bool, compare_to: object) -> bool:  # noqa: FBT001
    """The `include_object` of alembic's context.configure(): returns False for outbox tables that the project's
    metadata lacks.
    """
    return not (type_ == "table" and reflected and compare_to is None and is_outbox_table(item))


def setup(plugin: Plugin) -> None:
    """Set up the plugin; alembic calls this by the entry point `alembic.plugins`."""
    from alembic.util import DispatchPriority

    plugin.add_autogenerate_comparator(_keep_outbox_tables, "schema", priority=DispatchPriority.LAST)


def _keep_outbox_tables(
    _context: AutogenContext, upgrade_ops: UpgradeOps, _schemas: set[str | None]
) -> PriorityDispatchResult:
    """Remove what earlier comparators have found about our tables that exist only in the database."""
    from alembic.operations.ops import DropTableOp, ModifyTableOps
    from alembic.util import PriorityDispatchResult

    dropped_names = {
        (operation.schema, operation.table_name)
        for operation in upgrade_ops.ops
        if isinstance(operation, DropTableOp) and is_outbox_table(operation.to_table())
    }
    upgrade_ops.ops[:] = [
        operation
        for operation in upgrade_ops.ops
        if not (
            isinstance(operation, DropTableOp | ModifyTableOps)
            and (operation.schema, operation.table_name) in dropped_names
        )
    ]
    return PriorityDispatchResult.CONTINUE
