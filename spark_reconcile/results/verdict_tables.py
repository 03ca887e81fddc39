"""The tables of verdicts: their columns, derived from classified evidence, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_reconcile.classify.classification import ClassifiedEvidence
from spark_reconcile.classify.window_placement import BUSINESS_AT_MS, DELIVERY_AT_MS, MESSAGE_AT_MS
from spark_reconcile.core.settings import Settings
from spark_reconcile.rules.verdict_rule import Scope

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_VERDICTS: Final = (
    "scope", "message_id", "topic", "state", "rule", "severity", "deliver_at_ms", "stored_ms", "message_key",
    "consumer_group", "created_ms", "sent_ms", "first_delivered_ms", "acked_ms", "handled_ms", "outbox", "archive",
    "broker", "canceled", "business", "deliveries", "acks", "effects", "at_ms", "published_ms", "resent", "repeated",
    "turned_away", "confirmed", "collation",
)  # fmt: skip
_OF_BUSINESS: Final = (
    "business_rule", "topic", "message_key", "rows", "messages", "at_ms", "state", "rule", "severity", "confirmed",
    "collation",
)  # fmt: skip
TABLES: Final = {"verdicts": _VERDICTS, "business_verdicts": _OF_BUSINESS}
"""The columns of each table of a window."""
_COLLATION: Final = "cast(null as string) as collation"
"""By which collation the keys of a message and its row are equal, where that is the finding."""
_TURNED_AWAY: Final = (
    "if(effects > 0 and last_delivered_ms > effect_ms, greatest(deliveries - nacks - effects, 0L), 0L)"
)
"""Deliveries after the effect that no failure explains: the inbox rejected them as duplicates."""


def verdicts(classified: ClassifiedEvidence) -> DataFrame:
    """Returns the table of verdicts on messages and deliveries."""
    shared = ("topic", "state", "rule", "severity", "deliver_at_ms", "stored_ms", "confirmed", "window_ms", _COLLATION)
    messages = classified.messages.selectExpr(
        f"'{Scope.MESSAGE}' as scope", "id as message_id", *shared, "nullif(message_key, '') as message_key",
        "cast(null as string) as consumer_group", "created_ms", "sent_ms", "0L as first_delivered_ms",
        "0L as acked_ms", "0L as handled_ms", "outbox", "archive", "broker", "canceled", "business", "0L as deliveries",
        "0L as acks", "0L as effects", f"{MESSAGE_AT_MS} as at_ms",
        "created_ms as published_ms", "resent", "repeated", "0L as turned_away",
    )  # fmt: skip
    deliveries = classified.deliveries.selectExpr(
        f"'{Scope.DELIVERY}' as scope", "id as message_id", *shared, "cast(null as string) as message_key",
        "consumer_group", "0L as created_ms", "0L as sent_ms", "first_delivered_ms", "first_ack_ms as acked_ms",
        "effect_ms as handled_ms", "0L as outbox", "0L as archive", "stored as broker", "canceled", "0L as business",
        "deliveries", "acks", "effects", f"{DELIVERY_AT_MS} as at_ms",
        "published_ms", "0L as resent", "0L as repeated", f"{_TURNED_AWAY} as turned_away",
    )  # fmt: skip
    return messages.unionByName(deliveries)


def business_verdicts(classified: ClassifiedEvidence, settings: Settings) -> DataFrame:
    """Returns the table of verdicts on business rows: one row for each rule and key."""
    names = [f"when {rule_number} then '{sql_text(rule.name)}'" for rule_number, rule in enumerate(settings.rules)]
    name = f"case rule_number {' '.join(names)} end" if names else "''"
    return classified.business.selectExpr(
        f"{name} as business_rule", "topic", "message_key", "rows", "messages",
        f"{BUSINESS_AT_MS} as at_ms", "state", "rule", "severity", "confirmed", "window_ms",
        _COLLATION,
    )  # fmt: skip


def write_whole_tables(table: DataFrame, business: DataFrame, folder_of: Callable[[str], str]) -> None:
    """Write both tables of a full run; `folder_of`: returns the folder for a table's name."""
    table.select(*TABLES["verdicts"]).write.parquet(folder_of("verdicts"))
    business.select(*TABLES["business_verdicts"]).coalesce(1).write.parquet(folder_of("business_verdicts"))


def write_by_window(frame: DataFrame, name: str, windows: Sequence[int], *, stage: Path) -> None:
    """Write the rows of each of these windows that has any, to `stage/<window>/<name>`."""
    whole = stage / f".{name}"
    frame.select(*TABLES[name], "window_ms").repartition("window_ms").write.partitionBy("window_ms").parquet(str(whole))
    for start in windows:
        part = whole / f"window_ms={start}"
        if part.exists():
            (stage / str(start)).mkdir(exist_ok=True)
            part.rename(stage / str(start) / name)


def write_verdicts(frame: DataFrame, folder: Path) -> None:
    """Write verdicts of several windows as one table, with the window as a column."""
    frame.select(*TABLES["verdicts"], "window_ms").coalesce(1).write.parquet(str(folder))


def sql_text(text: str) -> str:
    """Escapes text for a Spark SQL literal."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
