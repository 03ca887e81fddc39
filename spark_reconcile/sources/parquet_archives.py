"""Reads archive rows that were moved to Parquet files, in the columns of all legs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.sources.parquet_file_identity import Files, some_files
from spark_reconcile.sources.sql_statements import ARCHIVE_COLUMNS, CANCELS, Leg, archive_note

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def archive_files(session: SparkSession, folder: Path | str, whole: DataFrame) -> Files:
    """Returns the files of an archive that was moved to Parquet."""
    read = some_files(session, folder, whole)
    return Files(
        leg=Leg.ARCHIVE, names=whole.inputFiles(), read=lambda names: archive_frame(read(names), place=str(folder))
    )


def archive_frame(found: DataFrame, *, place: str) -> DataFrame:
    """Converts Parquet rows of an archive to legs' rows. Raises ConfigurationError for a missing column."""
    missing = sorted(ARCHIVE_COLUMNS - set(found.columns))
    if missing:
        told = "it needs the columns of the archive table"
        raise ConfigurationError(f"the archive {place} has no column {missing[0]}; {told}")
    return found.where("kind in ('publish', 'cancel')").selectExpr(
        f"'{Leg.ARCHIVE}' as leg", "id", f"if(kind = 'cancel', '{CANCELS}', topic) as topic", "message_key",
        "cast(null as string) as consumer_group", "body_sha256",
        "deliver_at_ms", "created_at_us div 1000 as created_ms", "sent_at_us div 1000 as at_ms",
        "cast(attempts as bigint) as attempts", f"{archive_note()} as note",
    )  # fmt: skip
