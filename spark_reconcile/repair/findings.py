"""Reads findings of a run, or of published windows: those that may be repaired, and those that are only listed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.repair.plan import CANCEL_RULE, LOST_RULE, UNSENT_RULE, Suspect
from spark_reconcile.results.window_store import WindowStore

_COLUMNS: Final = ("message_id", "topic", "message_key", "rule")
_OF_MESSAGES: Final = [("rule", "in", [UNSENT_RULE, LOST_RULE, CANCEL_RULE]), ("scope", "=", "message")]
_OF_ROWS: Final = [("rule", "in", ["no_message", "too_few_messages"])]


def hour_folders(output: Path, *, since_ms: int, until_ms: int) -> list[Path]:
    """Returns the folders of the windows that overlap [since, until); a full run has one folder of its own."""
    store = WindowStore(output)
    return [
        store.folder(start)
        for start in sorted(store.windows)
        if start + HOUR_MS > since_ms and start < until_ms
    ]  # fmt: skip


def confirmed_suspects(folders: Sequence[Path]) -> list[Suspect]:
    """Returns messages that are lost or unsent, confirmed by the recheck, from the tables in these folders."""
    found = []
    for table in _tables(folders, "verdicts"):
        rows = _rows(table, _COLUMNS, [*_OF_MESSAGES, ("confirmed", "=", True)])
        found += [
            Suspect(message_id=row["message_id"], topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: str(row["message_id"]))
        ]
    return found


def unconfirmed_count(folders: Sequence[Path]) -> int:
    """Counts lost or unsent messages that were too many for a recheck."""
    unconfirmed = [*_OF_MESSAGES, ("confirmed", "=", False)]
    return sum(len(_rows(table, ("rule",), unconfirmed)) for table in _tables(folders, "verdicts"))


def unpublished_rows(folders: Sequence[Path], *, rows_max: int) -> list[Suspect]:
    """Returns at most `rows_max` business rows without their message, one a key, in order of time."""
    found: list[Suspect] = []
    for table in _tables(folders, "business_verdicts"):
        rows = _rows(table, ("topic", "message_key", "rule", "at_ms"), _OF_ROWS)
        found += [
            Suspect(message_id="", topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: (row["at_ms"], str(row["message_key"])))
        ]
        if len(found) >= rows_max:
            return found[:rows_max]
    return found


def _tables(folders: Sequence[Path], name: str) -> list[Path]:
    """Returns the existing tables: an hour without rows classified one by one has none."""
    return [folder / name for folder in folders if (folder / name).exists()]


def _rows(table: Path, columns: Sequence[str], filters: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    found: list[dict[str, Any]] = pq.read_table(table, columns=list(columns), filters=filters).to_pylist()
    return found
