"""Latencies of each hop, from a sample of the messages: by a hash of the id, so that all sources sample the same ids.

They are stored by the hour as histograms, so that hours can be merged later: percentiles cannot be, and Spark's
sketches can, but not without Spark, which the report does not start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from outbox_core.common.errors import DECODE_ERRORS
from spark_reconcile.core.dataframes import union
from spark_reconcile.core.plausible_times import EARLIEST_MS, LATEST_MS
from spark_reconcile.core.synced_files import write_whole
from spark_reconcile.core.time_buckets import HOUR_MS, hour
from spark_reconcile.load.source_reader import Evidence
from spark_reconcile.results.summary import Latency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE_ROWS: Final = 200_000
"""Approximate size of the sample; fewer messages are all measured."""
HOPS_AN_HOUR_MAX: Final = 500
"""Limit of hops (of a topic and group) that are stored for an hour: those with the most messages."""
# A file a window, since windows.json is replaced whole with each batch, and read by every report.
FILE: Final = "latencies.json"
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_ALL: Final = 0
"""The only window of a full run."""
_EXACT: Final = 32
_STEPS: Final = 16
"""Up to _EXACT milliseconds each value has a bucket of its own; above, each doubling has so many buckets."""
_BITS: Final = "length(bin(v))"
_STEP: Final = (
    f"if(v < {_EXACT}, v, {_EXACT} + ({_BITS} - 6) * {_STEPS} + shiftright(v, cast({_BITS} - 5 as int)) - {_STEPS})"
)
_SHARES: Final = (0.5, 0.95, 0.99)


class Hop(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One hop on one topic (and group) in one hour: counts by step of the histogram, and the longest value."""

    hop: str
    topic: str
    of: str
    longest_ms: int
    steps: dict[int, int]


class Hour(msgspec.Struct, frozen=True, kw_only=True):
    """The hops of an hour, measured on one message of `one_in`."""

    one_in: int
    hops: list[Hop]


def sampled_hours(evidence: Evidence, windows: Sequence[int] | None) -> dict[int, Hour]:
    """Measures the messages published in each of these windows; None: all messages as one window."""
    stored = sum(count.rows for count in evidence.counts if count.input_kind == "messages")
    one_in = max(1, -(-stored // SAMPLE_ROWS))
    hops: dict[int, list[Hop]] = {start: [] for start in windows or [_ALL]}
    for (start, hop, topic, of), (longest_ms, steps) in _counted(_hops(evidence, windows, one_in=one_in)).items():
        if start in hops:
            hops[start].append(Hop(hop=hop, topic=topic, of=of, longest_ms=longest_ms, steps=steps))
    return {start: Hour(one_in=one_in, hops=_most(hour_hops)) for start, hour_hops in hops.items()}


def latencies_of(hours: Iterable[Hour]) -> list[Latency]:
    """Returns percentiles by topic and group over many hours; counts are extrapolated to all messages."""
    steps: dict[tuple[str, str, str], dict[int, int]] = {}
    longest: dict[tuple[str, str, str], int] = {}
    for sampled_hour in hours:
        for hop in sampled_hour.hops:
            hop_key = (hop.topic, hop.hop, hop.of)
            counts = steps.setdefault(hop_key, {})
            for step, count in hop.steps.items():
                counts[step] = counts.get(step, 0) + count * sampled_hour.one_in
            longest[hop_key] = max(hop.longest_ms, longest.get(hop_key, 0))
    return [_latency(hop_key, counts, longest_ms=longest[hop_key]) for hop_key, counts in sorted(steps.items())]


def keep_hours(folders: Mapping[int, Path], hours: Mapping[int, Hour]) -> None:
    """Write hours to the folders of their windows, if not there yet. Raises OSError."""
    for start, folder in folders.items():
        if start in hours and folder.exists() and not (folder / FILE).exists():
            write_whole(folder / FILE, msgspec.json.encode(hours[start]))


def kept_hour(folder: Path) -> Hour | None:
    """Reads the hour from a window's folder; None: there is none that can be read."""
    try:
        with (folder / FILE).open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Hour)
    except (OSError, *DECODE_ERRORS):
        return None


def step_of(value_ms: int) -> int:
    """Returns the step in which a value is counted; equal to the SQL expression."""
    if value_ms < _EXACT:
        return value_ms
    bits = value_ms.bit_length()
    return _EXACT + (bits - 6) * _STEPS + (value_ms >> (bits - 5)) - _STEPS


def value_of(step: int) -> int:
    """Returns the middle of a step."""
    if step < _EXACT:
        return step
    doubling, offset = divmod(step - _EXACT, _STEPS)
    return ((_STEPS + offset) << (doubling + 1)) + (1 << doubling)


def _hops(evidence: Evidence, windows: Sequence[int] | None, *, one_in: int) -> DataFrame:
    """Returns (window_ms, hop, topic, of, v): each value of the sample."""
    from pyspark.sql.functions import expr

    chosen = f"pmod(xxhash64(id), {one_in}) = 0"
    first_ms, last_ms = (windows[0], windows[-1] + HOUR_MS) if windows else (EARLIEST_MS, LATEST_MS)
    near = f"created_ms between {first_ms}L and {last_ms}L"
    messages = (
        evidence.messages.where(f"{chosen} and {near}")
        .groupBy("id", "topic")
        .agg(
            expr("min(created_ms)").alias("created_ms"),
            expr("min(stored_ms)").alias("stored_ms"),
            expr("max(deliver_at_ms)").alias("due_ms"),
        )
    )
    events = evidence.actions.where(f"kind in ('delivered', 'acked') and {chosen}").selectExpr(
        "id", "topic", "consumer_group", "if(kind = 'delivered', at_ms, null) as given_ms",
        "if(kind = 'acked', at_ms, null) as acked_ms", "cast(null as bigint) as handled_ms",
    ).unionByName(
        evidence.inboxes.where(chosen).selectExpr(
            "id", "topic", "consumer_group", "cast(null as bigint) as given_ms", "cast(null as bigint) as acked_ms",
            "at_ms as handled_ms",
        )
    )  # fmt: skip
    names = ("given_ms", "acked_ms", "handled_ms")
    taken = events.groupBy("id", "topic", "consumer_group").agg(dict.fromkeys(names, "min"))
    taken = taken.selectExpr("id", "topic", "consumer_group", *(f"`min({name})` as {name}" for name in names))
    ready = "greatest(stored_ms, coalesce(due_ms, 0L))"
    at_once = f"due_ms is null and handled_ms between {EARLIEST_MS}L and {LATEST_MS}L"
    window = f"{hour('created_ms') if windows else f'{_ALL}L'} as window_ms"
    stored = messages.selectExpr(
        window, "'commit to broker' as hop", "topic", "'' as of", "stored_ms - created_ms as v"
    )  # fmt: skip
    hops = {
        "due to first hand-out": f"given_ms - {ready}",
        "hand-out to acknowledgement": "acked_ms - given_ms",
        "commit to handler": f"if({at_once}, handled_ms - created_ms, null)",
    }
    stack_columns = ", ".join(f"'{hop}', {value}" for hop, value in hops.items())
    delivered = messages.join(taken, ["id", "topic"]).selectExpr(
        window, "topic", "consumer_group as of", f"stack({len(hops)}, {stack_columns}) as (hop, v)"
    )  # fmt: skip
    values = union(stored, delivered).where("v is not null")
    return values.selectExpr("window_ms", "hop", "coalesce(topic, '') as topic", "of", "greatest(v, 0L) as v")


def _counted(values: DataFrame) -> dict[tuple[int, str, str, str], tuple[int, dict[int, int]]]:
    """Returns by window, hop, topic and group: the longest value, and counts by step."""
    from pyspark.sql.functions import expr

    group_columns = ("window_ms", "hop", "topic", "of")
    grouped = values.selectExpr(*group_columns, "v", f"cast({_STEP} as int) as step").groupBy(*group_columns, "step")
    table = grouped.agg(expr("count(*)").alias("n"), expr("max(v)").alias("longest_ms")).toArrow()
    by_hop: dict[tuple[int, str, str, str], tuple[int, dict[int, int]]] = {}
    for *key_values, step, count, longest_ms in zip(*(column.to_pylist() for column in table.columns), strict=True):
        start, hop, topic, of = key_values
        before, steps = by_hop.get((start, hop, topic, of), (0, {}))
        steps[step] = count
        by_hop[start, hop, topic, of] = (max(before, longest_ms), steps)
    return by_hop


def _most(hops: list[Hop]) -> list[Hop]:
    most = sorted(hops, key=lambda hop: (-sum(hop.steps.values()), hop.topic, hop.hop, hop.of))[:HOPS_AN_HOUR_MAX]
    return sorted(most, key=lambda hop: (hop.topic, hop.hop, hop.of))


def _latency(hop_key: tuple[str, str, str], steps: Mapping[int, int], *, longest_ms: int) -> Latency:
    topic, hop, of = hop_key
    total = sum(steps.values())
    p50, p95, p99 = (min(_percentile(steps, total * share), longest_ms) for share in _SHARES)
    return Latency(hop=hop, topic=topic, of=of, count=total, p50_ms=p50, p95_ms=p95, p99_ms=p99, longest_ms=longest_ms)


def _percentile(steps: Mapping[int, int], rank: float) -> int:
    below = 0
    for step, count in sorted(steps.items()):
        below += count
        if below >= rank:
            return value_of(step)
    return 0
