"""Reads the small files that a configuration names: a secret, and the configuration itself. Not what they mean."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from outbox_core.common.errors import ConfigurationError

SECRET_BYTES_MAX: Final = 4 * 1024
TOML_BYTES_MAX: Final = 16 * 1024 * 1024


def read_secret(path: Path, *, what: str) -> str:
    """A file's text without the white space around it; `what` it is, for people. Raises ConfigurationError, which
    quotes nothing of it."""
    try:
        return _read(path, bytes_max=SECRET_BYTES_MAX, what=f"{what} file").strip()
    except UnicodeDecodeError:  # not chained: it quotes what it could not read
        raise ConfigurationError(f"the {what} file {path} is not UTF-8") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration. Raises ConfigurationError."""
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
