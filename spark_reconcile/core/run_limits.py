"""Limits of a run that decide how it works, and no verdict. Values only; the defaults suit one machine."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """How much a run reads, keeps and rechecks at once.

    Up to `snapshot_rows_max` rows of a database are read in one consistent snapshot, more in parallel ranges, table by
    table; up to `medium_rows_max` rows Java is set for a medium amount of work. At most `suspects_max` findings are
    rechecked, `suspects_a_part` at a time. Runs by the hour evaluate `windows_a_batch` hours together. A file whose
    content has not changed for `file_rest_ms` is at rest: its digests are kept, in at most `digest_generations_max`
    generations. Sealed segments of at least `kept_segment_bytes_min` are kept as Parquet: smaller ones are read in less
    time than a Parquet file. Up to `one_partition_rows_max` rows are in one partition, and sets of them are literals of
    query plans: they take less time than the tasks, shuffles and jobs of many. An export of the delay cluster may take
    `delay_export_s_max`.
    """

    snapshot_rows_max: int = 500_000
    medium_rows_max: int = 12_000_000
    suspects_max: int = 100_000
    suspects_a_part: int = 5_000
    windows_a_batch: int = 24 * 7
    file_rest_ms: int = 2_000
    digest_generations_max: int = 24
    kept_segment_bytes_min: int = 4 * MIB
    delay_export_s_max: int = 3_600
    one_partition_rows_max: int = 20_000
