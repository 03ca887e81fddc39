"""The findings of shown windows that a repair may begin with, or that it names and leaves. Reads tables only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from spark_reconcile.repair import LOST_RULE, UNSENT_RULE, Suspect
from spark_reconcile.slots import HOUR_MS
from spark_reconcile.window_store import WindowStore

_COLUMNS: Final = ("message_id", "topic", "message_key", "rule")
_OF_MESSAGES: Final = [("rule", "in", [UNSENT_RULE, LOST_RULE]), ("scope", "=", "message")]
_OF_ROWS: Final = [("rule", "in", ["no_message", "too_few_messages"])]


def confirmed_suspects(output: Path, *, since_ms: int, until_ms: int) -> list[Suspect]:
    """Messages that a second look, too, found lost or unsent, of the windows that touch [since, until)."""
    found = []
    for folder in _folders(output, "verdicts", since_ms=since_ms, until_ms=until_ms):
        rows = _rows(folder, _COLUMNS, [*_OF_MESSAGES, ("confirmed", "=", True)])
        found += [
            Suspect(message_id=row["message_id"], topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: str(row["message_id"]))
        ]
    return found


def unconfirmed_count(output: Path, *, since_ms: int, until_ms: int) -> int:
    """How many messages were found lost or unsent, and were too many to be looked at again."""
    folders = _folders(output, "verdicts", since_ms=since_ms, until_ms=until_ms)
    return sum(len(_rows(folder, ("rule",), [*_OF_MESSAGES, ("confirmed", "=", False)])) for folder in folders)


def unpublished_rows(output: Path, *, since_ms: int, until_ms: int, rows_max: int) -> list[Suspect]:
    """Business rows without their message, a key each, in order of time; `rows_max` of them at most."""
    found: list[Suspect] = []
    for folder in _folders(output, "business_verdicts", since_ms=since_ms, until_ms=until_ms):
        rows = _rows(folder, ("topic", "message_key", "rule", "at_ms"), _OF_ROWS)
        found += [
            Suspect(message_id="", topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: (row["at_ms"], str(row["message_key"])))
        ]
        if len(found) >= rows_max:
            return found[:rows_max]
    return found


def _folders(output: Path, table: str, *, since_ms: int, until_ms: int) -> Iterator[Path]:
    store = WindowStore(output)
    for start in sorted(store.windows):
        folder = store.folder(start) / table
        if start + HOUR_MS > since_ms and start < until_ms and folder.exists():
            yield folder


def _rows(folder: Path, columns: Sequence[str], filters: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    found: list[dict[str, Any]] = pq.read_table(folder, columns=list(columns), filters=filters).to_pylist()
    return found
