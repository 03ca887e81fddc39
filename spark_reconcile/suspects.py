"""The findings of shown windows that a repair may begin with: confirmed ones, of two rules alone. Reads tables only."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from spark_reconcile.repair import LOST_RULE, UNSENT_RULE, Suspect
from spark_reconcile.slots import HOUR_MS
from spark_reconcile.window_store import WindowStore

_COLUMNS: Final = ("message_id", "topic", "message_key", "rule")


def confirmed_suspects(output: Path, *, since_ms: int, until_ms: int) -> list[Suspect]:
    """Messages that a second look, too, found lost or unsent, of the windows that touch [since, until)."""
    import pyarrow.parquet as pq

    store, found = WindowStore(output), []
    for start in sorted(store.windows):
        folder = store.folder(start) / "verdicts"
        if start + HOUR_MS <= since_ms or start >= until_ms or not folder.exists():
            continue
        filters = [("rule", "in", [UNSENT_RULE, LOST_RULE]), ("confirmed", "=", True), ("scope", "=", "message")]
        rows = pq.read_table(folder, columns=list(_COLUMNS), filters=filters).to_pylist()
        found += [
            Suspect(message_id=row["message_id"], topic=row["topic"], key=row["message_key"], rule=row["rule"])
            for row in sorted(rows, key=lambda row: str(row["message_id"]))
        ]
    return found
