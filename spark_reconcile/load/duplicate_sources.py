"""Detects a source that is named twice, in any spelling: all its rows would count twice. Reads no rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outbox_core.common.errors import ConfigurationError


class NamedSources:
    """The sources named so far: each table by the identity of its database, independent of the spelling."""

    def __init__(self) -> None:
        self._named: dict[tuple[object, ...], list[tuple[str, frozenset[str]]]] = {}

    def note(self, name: str, table: tuple[object, ...], *, parts: Sequence[str] = ()) -> None:
        """Record `parts` of the table, or all of it. Raises ConfigurationError if any of that was named before."""
        mine = frozenset(parts)
        for other, theirs in self._named.get(table, ()):
            if not mine or not theirs or mine & theirs:
                raise ConfigurationError(
                    f"{other} and {name} are the same source: all that it holds would be counted twice; name it once"
                )
        self._named.setdefault(table, []).append((name, mine))


def check_archives(folders: Sequence[Path | str]) -> None:
    """Raises ConfigurationError for a folder that does not exist, has no Parquet file, or is named twice.

    For a URL only the text is compared: Spark opens it, with its own credentials.
    """
    once = NamedSources()
    for folder in folders:
        if isinstance(folder, str):
            once.note(f"[archive] {folder}", (_local(folder) or folder.rstrip("/"),))
            continue
        if not folder.is_dir():
            raise ConfigurationError(f"[archive]: there is no folder {folder}; name the one that holds Parquet files")
        if next(folder.rglob("*.parquet"), None) is None:
            raise ConfigurationError(
                f"[archive]: the folder {folder} holds no Parquet file; leave it out until it does"
            )
        once.note(f"[archive] {folder}", (folder.resolve(),))


def _local(url: str) -> Path | None:
    """Returns the folder of a `file:` URL, links resolved."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)).resolve() if parts.scheme == "file" else None
