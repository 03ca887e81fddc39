"""Reading tables by DB-API: connections by URL, and names that are checked before they stand in a statement.

Reads only.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.cursors import SSCursor

from messaging.errors import ConfigurationError, DatabaseUnavailable

CONNECT_SECONDS: Final = 10
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A database, taken apart from a SQLAlchemy URL."""

    backend: str
    host: str
    port: int
    user: str
    password: str
    database: str

    @staticmethod
    def of(url: str) -> Place:
        """Raises ConfigurationError for anything but MySQL, MariaDB and a SQLite file."""
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError as error:
            raise ConfigurationError(f"a source's url cannot be taken apart: {error}") from error
        backend = parts.scheme.partition("+")[0]
        if backend == "sqlite" and parts.path.strip("/"):
            return Place("sqlite", "", 0, "", "", unquote(parts.path.removeprefix("/")))
        if backend in {"mysql", "mariadb"} and parts.hostname:
            return Place(
                "mysql", parts.hostname, port, unquote(parts.username or ""),
                unquote(parts.password or ""), unquote(parts.path.strip("/")),
            )  # fmt: skip
        raise ConfigurationError(
            "a source's url is mysql+pymysql://user@host/database or sqlite:///file.db, not "
            f"{parts.scheme or 'nothing'}://..."
        )

    def __str__(self) -> str:
        return self.database if self.backend == "sqlite" else f"{self.host}:{self.port}/{self.database}"


@contextmanager
def connected(place: Place) -> Iterator[Any]:
    """A connection, read-only as far as the database can be told so. Raises DatabaseUnavailable with the cure."""
    try:
        with closing(_open(place)) as connection:
            yield connection
    except (sqlite3.Error, pymysql.MySQLError) as error:
        raise DatabaseUnavailable(
            f"cannot read the database {place} ({error}); check its url and that it runs"
        ) from error


def rows(
    place: Place, statement: str, parameters: Sequence[object] = (), *, batch_rows: int = 10_000
) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of a statement, in batches, without holding all of them. Placeholders are `?`."""
    with connected(place) as connection, closing(connection.cursor()) as cursor:
        cursor.execute(statement if place.backend == "sqlite" else statement.replace("?", "%s"), tuple(parameters))
        while batch := cursor.fetchmany(batch_rows):
            yield list(batch)


def columns_of(place: Place, *, schema: str | None, table: str) -> dict[str, str]:
    """The columns of a table and their types, in lower case; empty where there is none."""
    checked(table)
    if place.backend == "sqlite":
        found = rows(place, "SELECT name, type FROM pragma_table_info(?)", (table,))
    else:
        statement = (
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = ? AND table_name = ?"
        )
        found = rows(place, statement, (schema or place.database, table))
    return {str(name): str(kind).lower() for batch in found for name, kind in batch}


def checked(name: str) -> str:
    """A table's or column's name that is safe to quote. Raises ConfigurationError."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is not a table's or column's name: letters, digits and _ only")
    return name


def quoted(place: Place, *names: str | None) -> str:
    """Checked names, quoted for this database and joined by dots; None is left out."""
    mark = '"' if place.backend == "sqlite" else "`"
    return ".".join(f"{mark}{checked(name)}{mark}" for name in names if name is not None)


def _open(place: Place) -> Any:
    if place.backend == "sqlite":
        uri = f"{Path(place.database).resolve().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, timeout=CONNECT_SECONDS)
    connection = pymysql.connect(
        host=place.host, port=place.port, user=place.user, password=place.password, database=place.database or None,
        charset="utf8mb4", connect_timeout=CONNECT_SECONDS, cursorclass=SSCursor, autocommit=True,
    )  # fmt: skip
    with closing(connection.cursor()) as cursor:
        cursor.execute("SET SESSION TRANSACTION READ ONLY")
    return connection
