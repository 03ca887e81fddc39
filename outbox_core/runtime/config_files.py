"""Reads small files: secrets that a configuration names, and the TOML of the configuration itself."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from outbox_core.common.errors import ConfigurationError

SECRET_BYTES_MAX: Final = 4 * 1024
TOML_BYTES_MAX: Final = 16 * 1024 * 1024


def read_secret(path: Path, *, what: str) -> str:
    """Returns a file's text, stripped of white space; `what` describes it in errors. Raises ConfigurationError, which
    quotes nothing of it."""
    try:
        return _read(path, bytes_max=SECRET_BYTES_MAX, what=f"{what} file").strip()
    except UnicodeDecodeError:  # not chained: it quotes the file's bytes
        raise ConfigurationError(f"the {what} file {path} is not UTF-8") from None


def read_optional_secret(path: Path | None, *, what: str) -> str | None:
    """Returns what read_secret() returns, and None for no file. Raises ConfigurationError for an empty one, too."""
    if path is None:
        return None
    text = read_secret(path, what=what)
    if not text:
        raise ConfigurationError(f"the {what} file {path} is empty")
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a configuration file. Raises ConfigurationError."""
    try:
        return tomllib.loads(_read(path, bytes_max=TOML_BYTES_MAX, what="configuration"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration {path} is not TOML: {error}") from error


def _read(path: Path, *, bytes_max: int, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} {path}: {error.strerror}") from error
    if len(data) > bytes_max:
        raise ConfigurationError(f"the {what} {path} has more than {bytes_max:,} bytes, which none has")
    return data.decode("utf-8")
