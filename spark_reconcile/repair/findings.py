"""Reads findings of a run, or of published windows: those that may be repaired, and those that are only listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any, Final

from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.repair.plan import CANCEL_RULE, LOST_RULE, UNSENT_RULE, Suspect
from spark_reconcile.results.window_store import WindowStore

BATCH_ROWS: Final = 10_000
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
    suspects = []
    for table in _tables(folders, "verdicts"):
        rows = _each_row(table, _COLUMNS, [*_OF_MESSAGES, ("confirmed", "=", True)])
        suspects += [
            Suspect(message_id=row["message_id"], topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: str(row["message_id"]))
        ]
    return suspects


def unconfirmed_count(folders: Sequence[Path]) -> int:
    """Counts lost or unsent messages that were too many for a recheck."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    unconfirmed = pq.filters_to_expression([*_OF_MESSAGES, ("confirmed", "=", False)])
    tables = _tables(folders, "verdicts")
    return sum(ds.dataset(table, format="parquet").count_rows(filter=unconfirmed) for table in tables)


def unpublished_rows(folders: Sequence[Path], *, rows_max: int) -> list[Suspect]:
    """Returns at most `rows_max` business rows without their message, one a key, in order of time."""
    suspects: list[Suspect] = []
    for table in _tables(folders, "business_verdicts"):
        rows = _each_row(table, ("topic", "message_key", "rule", "at_ms"), _OF_ROWS)
        # There may be millions, where a source is missing: only those that are returned are kept.
        earliest = nsmallest(rows_max - len(suspects), rows, key=lambda row: (row["at_ms"], str(row["message_key"])))
        suspects += [
            Suspect(message_id="", topic=row["topic"], key=row["message_key"], rule=row["rule"]) for row in earliest
        ]
        if len(suspects) >= rows_max:
            break
    return suspects


def _tables(folders: Sequence[Path], name: str) -> list[Path]:
    """Returns the existing tables: an hour without rows classified one by one has none."""
    return [folder / name for folder in folders if (folder / name).exists()]


def _each_row(table: Path, columns: Sequence[str], filters: list[tuple[str, str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table, never all of them in memory."""
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    rows = ds.dataset(table, format="parquet")
    matching = pq.filters_to_expression(filters)
    for batch in rows.to_batches(columns=list(columns), filter=matching, batch_size=BATCH_ROWS):
        yield from batch.to_pylist()
