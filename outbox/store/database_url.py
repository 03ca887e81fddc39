"""Reads a database's URL and its password file from a command's arguments. Opens no connection."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.store.databases.supported import SYNC_DRIVERS
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import read_secret


def database_url(text: str, *, password_file: Path | None) -> URL:
    """Returns the URL for a command, as sync_url() does, with the password from the file if one is given: a command
    line must not contain secrets. Raises ConfigurationError, which does not repeat the text.
    """
    url = sync_url(text)
    return url if password_file is None else url.set(password=read_secret(password_file, what="password"))


def sync_url(database: URL | str) -> URL:
    """Returns the URL for synchronous code: an async driver, as a service's URL may name it, is replaced by PyMySQL or
    sqlite3. Raises ConfigurationError.
    """
    url = read_url(database)
    _, _, driver = url.drivername.partition("+")
    return url.set(drivername=SYNC_DRIVERS[driver]) if driver in SYNC_DRIVERS else url


def read_url(text: URL | str) -> URL:
    """Parses a URL. Raises ConfigurationError, which does not repeat the text."""
    try:
        return make_url(text)
    except (ArgumentError, ValueError) as error:  # a port that is not a number raises a plain ValueError
        raise ConfigurationError(
            "not a database URL that can work; use one like mysql+pymysql://user@host:3306/database or "
            "sqlite:///file.db, and write @ : / of a password as %40 %3A %2F"
        ) from error
