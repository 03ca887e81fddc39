"""A database's URL and the file that its password is in, as commands take them. It opens no connection."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from messaging.errors import ConfigurationError

PASSWORD_BYTES_MAX = 4 * 1024


def database_url(text: str, *, password_file: Path | None) -> URL:
    """The URL, with the password of the file where one is named: a secret has no place on a command line.

    Raises ConfigurationError, which does not repeat what was given.
    """
    url = read_url(text)
    return url if password_file is None else url.set(password=_password(password_file))


def read_url(text: URL | str) -> URL:
    """The URL that a text is. Raises ConfigurationError, which does not repeat what was given."""
    try:
        return make_url(text)
    except (ArgumentError, ValueError) as error:  # a port that is no number is a plain ValueError
        raise ConfigurationError(
            "not a database URL that can work; use one like mysql+pymysql://user@host:3306/database or "
            "sqlite:///file.db, and write @ : / of a password as %40 %3A %2F"
        ) from error


def _password(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(PASSWORD_BYTES_MAX).strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the password file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the password file {path} is not UTF-8") from error
