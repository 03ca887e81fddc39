"""Generates the records of benchmarks.reconcile.records with one changed message in every part. Parquet files.

    python -m benchmarks.reconcile.differing --folder data --into data-all

So no digest agrees, and every part is scanned once more. Business rows and archive are the same files, linked; of the
messages one a topic, quarter of an hour and part of the keys has another body. What was planted is noted, so that
benchmarks.reconcile.contest checks the findings, at any contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from benchmarks.reconcile.checking import also_changed, planted_in
from spark_reconcile.core.time_buckets import PART, period
from spark_reconcile.load.spark_session import spark_session


def write_differing(folder: Path, into: Path) -> int:
    """Write the records; returns how many parts there are."""
    from pyspark.sql.functions import broadcast, expr

    planted = planted_in(folder)
    for name in ("business", "archive"):
        shutil.copytree(folder / name, into / name, copy_function=os.link)
    with spark_session("local[2]", log=into / "spark.log") as spark:
        messages = spark.read.parquet(str(folder / "messages"))
        known = spark.createDataFrame([(one,) for one in planted["ids"]], "id string")
        whole = messages.join(broadcast(known), "id", "left_anti").selectExpr(
            "id", "message_key", "topic", "created_ms", f"{period('created_ms')} as period", f"{PART} as part"
        )
        first = whole.groupBy("topic", "period", "part").agg(
            expr("min(struct(id, message_key, created_ms))").alias("one")
        )
        chosen = first.selectExpr("topic", "one.id", "one.message_key", "one.created_ms").localCheckpoint()
        changed = messages.join(broadcast(chosen.selectExpr("id", "true as other")), "id", "left").selectExpr(
            *(f"if(other, sha2(id, 256), {name}) as {name}" if name == "body_sha256" else name
              for name in messages.columns)
        )  # fmt: skip
        changed.write.partitionBy("hour").parquet(str(into / "messages"))
        also_changed(planted, (row.asDict() for row in chosen.collect()))
        parts = chosen.count()
    for mark in (into / "messages").glob("*SUCCESS*"):
        mark.unlink()
    (into / "planted.json").write_text(json.dumps(planted))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.into.mkdir(parents=True)
    print(json.dumps({"parts_differing": write_differing(chosen.folder.resolve(), chosen.into.resolve())}))


if __name__ == "__main__":
    main()
