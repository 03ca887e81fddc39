"""How long each hop took, from a sample of the messages: by a hash of the id, so that every source samples the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from spark_reconcile.reading import Evidence
from spark_reconcile.slots import HOUR_MS
from spark_reconcile.summary import Latency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE_ROWS: Final = 200_000
"""Above so many messages, about so many are looked at."""
_SHARES: Final = "array(0.5D, 0.95D, 0.99D, 1D)"


def sampled_latencies(evidence: Evidence, windows: Sequence[int]) -> list[Latency]:
    """Percentiles by topic and group of what was published in these windows; counts are those of the sample."""
    from pyspark.sql.functions import expr

    stored = sum(one.rows for one in evidence.counts if one.leg == "messages")
    chosen = f"pmod(xxhash64(id), {max(1, -(-stored // SAMPLE_ROWS))}) = 0"
    messages = (
        evidence.messages.where(f"{chosen} and created_ms between {windows[0]}L and {windows[-1] + HOUR_MS}L")
        .groupBy("id", "topic")
        .agg(
            expr("min(created_ms)").alias("created_ms"),
            expr("min(stored_ms)").alias("stored_ms"),
            expr("max(deliver_at_ms)").alias("due_ms"),
        )
    )
    events = evidence.actions.where(f"kind in ('delivered', 'acked') and {chosen}").selectExpr(
        "id", "consumer_group", "if(kind = 'delivered', at_ms, null) as given_ms",
        "if(kind = 'acked', at_ms, null) as acked_ms", "cast(null as bigint) as handled_ms",
    ).unionByName(
        evidence.inboxes.where(chosen).selectExpr(
            "id", "consumer_group", "cast(null as bigint) as given_ms", "cast(null as bigint) as acked_ms",
            "at_ms as handled_ms",
        )
    )  # fmt: skip
    names = ("given_ms", "acked_ms", "handled_ms")
    taken = events.groupBy("id", "consumer_group").agg(dict.fromkeys(names, "min"))
    taken = taken.selectExpr("id", "consumer_group", *(f"`min({name})` as {name}" for name in names))
    ready = "greatest(stored_ms, coalesce(due_ms, 0L))"
    found = [
        _percentiles("commit to broker", messages, "stored_ms - created_ms", of="''"),
        *(
            _percentiles(hop, messages.join(taken, "id"), value, of="consumer_group")
            for hop, value in (
                ("due to first hand-out", f"given_ms - {ready}"),
                ("hand-out to acknowledgement", "acked_ms - given_ms"),
                ("commit to handler", "if(due_ms is null, handled_ms - created_ms, null)"),
            )
        ),
    ]
    whole = found[0]
    for one in found[1:]:
        whole = whole.unionByName(one)
    latencies = [_latency(row) for row in whole.collect() if row["n"]]
    return sorted(latencies, key=lambda hop: (hop.topic, hop.hop, hop.of))


def _percentiles(hop: str, frame: DataFrame, value: str, *, of: str) -> DataFrame:
    from pyspark.sql.functions import expr

    values = frame.selectExpr(f"'{hop}' as hop", "topic", f"{of} as of", f"greatest({value}, 0L) as v", f"{value} as w")
    return (
        values.where("w is not null")
        .groupBy("hop", "topic", "of")
        .agg(expr("count(*)").alias("n"), expr(f"percentile_approx(v, {_SHARES}, 10000)").alias("p"))
    )


def _latency(row: Any) -> Latency:
    p50, p95, p99, longest = (int(number) for number in row["p"])
    return Latency(
        hop=row["hop"], topic=row["topic"] or "", of=row["of"], count=row["n"], p50_ms=p50, p95_ms=p95, p99_ms=p99,
        longest_ms=longest,
    )  # fmt: skip
