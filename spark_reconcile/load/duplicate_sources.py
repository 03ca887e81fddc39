"""Detects a source that is named twice, in any spelling: all its rows would count twice. Reads no rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.sources.parquet_archives import check_archive
from spark_reconcile.sources.parquet_file_identity import local_folder


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
    """Raises ConfigurationError for a folder that does not exist, or is named twice, and what check_archive() raises.

    For a URL only the text is compared: Spark opens it, with its own credentials.
    """
    once = NamedSources()
    for folder in folders:
        if isinstance(folder, str):
            local = local_folder(folder)
            once.note(f"[archive] {folder}", (local.resolve() if local else folder.rstrip("/"),))
            continue
        if not folder.is_dir():
            raise ConfigurationError(f"[archive]: there is no folder {folder}; name the one that holds Parquet files")
        once.note(f"[archive] {folder}", (folder.resolve(),))
    for folder in folders:
        check_archive(folder)
