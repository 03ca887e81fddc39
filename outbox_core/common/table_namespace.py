"""Where the tables of an outbox are: in the business's own database, with prefixed names, or in a named schema. Pure.

The SDK, its commands, the compensator and the reconciliation take it from here, so that none looks elsewhere
(decision 118).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import ConfigurationError

PREFIX: Final = "outbox_"
"""Begins the names of tables that stand among the business's own."""


@dataclass(frozen=True, slots=True)
class TableNamespace:
    """`schema` is written into every statement (None on SQLite), so that no connection's current database decides."""

    schema: str | None
    prefix: str = ""

    def named(self, table: str) -> str:
        """Returns the name that a table of ours has here."""
        return f"{self.prefix}{table}"


FORMER_SCHEMA: Final = "outbox"
"""The schema that was the default once."""
VERSION_TABLE: Final = "outbox_alembic_version"
SIGNS_OF_SCHEMA: Final = frozenset({"message", VERSION_TABLE})
"""Tables by which a schema of the outbox's alone is known."""
SQLITE_NAMESPACE: Final = TableNamespace(None, PREFIX)


def namespace_among(named: str | None, *, current: str | None) -> TableNamespace:
    """Returns the namespace on MySQL and MariaDB: `named` is the schema that the user names, if any, `current` the
    database that a new connection of the business is in.

    A schema that is the business's own database is the default, so that it can be named. Raises
    ConfigurationError if there is neither.
    """
    if named is not None and named != current:
        return TableNamespace(named)
    if not current:
        raise ConfigurationError(
            "the outbox's tables have no place: the connection is in no database, and no schema is named; put the "
            "business's database into the URL (mysql+pymysql://user@host/shop), or name a schema (schema=, --schema)"
        )
    return TableNamespace(current, PREFIX)


def left_in_former_schema(database: str | None) -> ConfigurationError:
    """Returns the error of whoever found no tables in the business's database, and some in the schema FORMER_SCHEMA."""
    return ConfigurationError(
        f"the database {database} has no outbox tables, and this server has a schema {FORMER_SCHEMA!r} that has some: "
        f'name schema="{FORMER_SCHEMA}" (--schema {FORMER_SCHEMA}), if its rows are of this service, or '
        f'schema="{database}" (--schema {database}) for `outbox db upgrade`, if this is a new service'
    )
