"""The databases that the outbox runs on, and which of them a dialect is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sqlalchemy import LargeBinary, String, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine

from outbox.store.databases.database_port import Database, Failure
from outbox.store.databases.mysql import MySql
from outbox.store.databases.sqlite import SQLITE
from outbox_core.common.errors import ConfigurationError

_DATABASES: Final[tuple[Database, ...]] = (MySql(), SQLITE)
_BY_NAME: Final[Mapping[str, Database]] = {name: database for database in _DATABASES for name in database.names}

_NAMES: Final = [product for database in _DATABASES for product in database.products]
_PRODUCTS: Final = f"{', '.join(_NAMES[:-1])} and {_NAMES[-1]}"
EXAMPLE_URLS: Final = " or ".join(database.example_url for database in _DATABASES)
"""For messages."""
SYNC_DRIVERS: Final[Mapping[str, str]] = {
    driver: sync_driver for database in _DATABASES for driver, sync_driver in database.sync_drivers.items()
}
"""By the name of an async driver, the dialect and driver that reach the same database from a command."""
TABLE_OPTIONS: Final[Mapping[str, Any]] = {
    option: value for database in _DATABASES for option, value in database.table_options.items()
}
"""The options of each of our tables, on whichever database it is created."""


def database_of(dialect: Dialect) -> Database:
    """Returns the dialect's database. Raises ConfigurationError for one that the outbox does not run on."""
    return database_named(dialect.name)


def database_named(name: str) -> Database:
    """Returns the database of SQLAlchemy's name for a dialect or a URL's backend; raises as database_of() does."""
    database = _BY_NAME.get(name)
    if database is None:
        raise ConfigurationError(f"the outbox runs on {_PRODUCTS}, not on {name}; use a URL like {EXAMPLE_URLS}")
    return database


def known_database(dialect: Dialect) -> Database | None:
    """Returns the dialect's database; None for another's, whose engines a process may have beside the outbox's."""
    return _BY_NAME.get(dialect.name)


def failure_of(driver_error: BaseException | None) -> Failure | None:
    """Returns what a driver's error means, whichever database it is of: their tables have no error in common."""
    if driver_error is None:
        return None
    failures = (database.failure(driver_error) for database in _DATABASES)
    return next((failure for failure in failures if failure is not None), None)


# -- the types of columns, on whichever database they are created ------------------------------------------------------


def ascii_type(length: int) -> TypeEngine[Any]:
    """Returns the type of up to `length` ASCII characters."""
    return _of_each(String(length), lambda database: database.ascii_type(length))


def unicode_type(length: int) -> TypeEngine[Any]:
    """Returns the type of up to `length` characters."""
    return _of_each(String(length), lambda database: database.unicode_type(length))


def long_text_type() -> TypeEngine[Any]:
    """Returns the type of long texts."""
    return _of_each(Text(), lambda database: database.long_text_type())


def body_type() -> TypeEngine[Any]:
    """Returns the type of a message's body."""
    return _of_each(LargeBinary(), lambda database: database.body_type())


def _of_each(generic: TypeEngine[Any], own_type: Callable[[Database], TypeEngine[Any] | None]) -> TypeEngine[Any]:
    for database in _DATABASES:
        variant = own_type(database)
        if variant is not None:
            generic = generic.with_variant(variant, *sorted(database.names))
    return generic
