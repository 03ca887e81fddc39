"""Tables of verdicts on disk: the same columns, whether Spark judged or few rows are here. Judges none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_reconcile.in_memory import few, to_arrow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_TEXTS: Final = (
    "scope", "message_id", "topic", "message_key", "consumer_group", "state", "rule", "severity", "business_rule",
)  # fmt: skip
_VERDICTS: Final = (
    "scope", "message_id", "topic", "state", "rule", "severity", "deliver_at_ms", "stored_ms", "message_key",
    "consumer_group", "created_ms", "sent_ms", "first_delivered_ms", "acked_ms", "handled_ms", "outbox", "archive",
    "broker", "canceled", "business", "deliveries", "acks", "effects", "at_ms", "published_ms", "resent", "repeated",
    "turned_away", "confirmed",
)  # fmt: skip
_OF_BUSINESS: Final = (
    "business_rule", "topic", "message_key", "rows", "messages", "at_ms", "state", "rule", "severity", "confirmed",
)  # fmt: skip
TABLES: Final = {"verdicts": _VERDICTS, "business_verdicts": _OF_BUSINESS}
"""The columns of each table of a window."""
_FILE: Final = "part-0.parquet"


def write_by_window(frame: DataFrame, name: str, windows: Sequence[int], *, stage: Path) -> None:
    """The rows of each of these windows that has any, as `stage/<window>/<name>`."""
    chosen = frame.select(*TABLES[name], "window_ms")
    here = few(chosen)
    if here is not None:
        for start in windows:
            table = to_arrow(here.where(f"window_ms = {start}L"), _schema(name))
            if table.num_rows:
                _write(table, stage / str(start) / name)
        return
    whole = stage / f".{name}"
    chosen.repartition("window_ms").write.partitionBy("window_ms").parquet(str(whole))
    for start in windows:
        part = whole / f"window_ms={start}"
        if part.exists():
            (stage / str(start)).mkdir(exist_ok=True)
            part.rename(stage / str(start) / name)


def write_verdicts(frame: DataFrame, folder: Path) -> None:
    """Verdicts of several windows as one table, which names them."""
    chosen = frame.select(*TABLES["verdicts"], "window_ms")
    here = few(chosen)
    if here is not None:
        _write(to_arrow(here, f"{_schema('verdicts')}, window_ms bigint"), folder)
    else:
        chosen.coalesce(1).write.parquet(str(folder))


def _schema(name: str) -> str:
    """As Spark writes it."""
    kinds = {"confirmed": "boolean", **dict.fromkeys(_TEXTS, "string")}
    return ", ".join(f"{column} {kinds.get(column, 'bigint')}" for column in TABLES[name])


def _write(table: pa.Table, folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    pq.write_table(table, folder / _FILE)
