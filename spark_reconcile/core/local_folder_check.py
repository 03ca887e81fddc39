"""Checks which settings name local folders, and which may name a URL that Spark reads. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_CURES: Final[Mapping[str, str]] = {
    "[broker] data": "copy the broker's data folder to this machine, or mount it, and name that folder",
    "[output] folder": "name a local folder, or a mounted one, and copy its files afterwards",
}


def is_url(text: str) -> bool:
    """Whether a setting begins with a scheme, like `s3a://bucket/archive` or `file:///archive`."""
    return _URL.match(text) is not None


def check_local_folder(folder: Path, setting: str) -> None:
    """Raises ConfigurationError if a path was made from a URL: Path() turns `s3a://bucket` into `s3a:/bucket`.

    A folder that exists is accepted, whatever its name.
    """
    schemes = [part for part in folder.parts[:-1] if _SCHEME.fullmatch(part)]
    if schemes and not folder.exists():
        raise ConfigurationError(
            f"{setting} names a URL ({schemes[0]}//...), and must be a folder of this machine: {_CURES[setting]}. Only "
            "[archive] parquet takes URLs that Spark can read"
        )
