"""Whether a source is named twice, however it is spelled: everything in it would count twice. It reads no rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outbox_core.common.errors import ConfigurationError


class Once:
    """What was named so far: each table by the database that it is in, whatever that is called."""

    def __init__(self) -> None:
        self._named: dict[tuple[object, ...], list[tuple[str, frozenset[str]]]] = {}

    def note(self, name: str, table: tuple[object, ...], *, parts: Sequence[str] = ()) -> None:
        """`parts` of the table, or all of it. Raises ConfigurationError where any of that was named before."""
        mine = frozenset(parts)
        for other, theirs in self._named.get(table, ()):
            if not mine or not theirs or mine & theirs:
                raise ConfigurationError(
                    f"{other} and {name} are the same source: all that it holds would be counted twice; name it once"
                )
        self._named.setdefault(table, []).append((name, mine))


def check_archives(folders: Sequence[Path | str]) -> None:
    """Raises ConfigurationError for a folder that is not there, holds no Parquet file, or is named twice.

    Of a URL only its text is compared: Spark opens it, with its own credentials.
    """
    once = Once()
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
    """The folder that a `file:` URL names, links resolved."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)).resolve() if parts.scheme == "file" else None
