"""datacompy on the records of benchmarks.reconcile.records, in an environment of its own; prints JSON.

    uv venv datacompy-env && uv pip install --python datacompy-env/bin/python 'datacompy[spark]'
    datacompy-env/bin/python benchmarks/reconcile/datacompy_peer.py --folder data --rounds 1

It compares two tables at a time, so it is asked twice: archive with messages by id, business with archive by topic and
key; the second time only keys can be compared. Its libraries are its own, hence the environment; the session has the
same cores and memory. Imports nothing of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = {
    "messages": ("id", "topic", "message_key", "body_sha256"),
    "archive": ("id", "topic", "message_key", "body_sha256"),
    "business": ("topic", "message_key", "created_ms"),
}
PAIRS = ((("archive", "messages"), ["id"]), (("business", "archive"), ["topic", "message_key"]))


def compare(spark: Any, folder: Path) -> dict[str, int]:
    """Rows on one side alone, and rows that differ, of both pairs."""
    from datacompy.spark import SparkSQLCompare

    found = {}
    for (left, right), keys in PAIRS:
        names = [name for name in COLUMNS[left] if left != "business" or name in keys]
        frames = [spark.read.parquet(str(folder / one)).select(*names) for one in (left, right)]
        compared = SparkSQLCompare(spark, *frames, join_columns=keys)
        found[f"{left} alone"] = compared.df1_unq_rows.count()
        found[f"{right} missing in {left}"] = compared.df2_unq_rows.count()
        found[f"{left} and {right} alike"] = compared.count_matching_rows()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    chosen = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", "16")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    took, found = [], {}
    for _ in range(chosen.rounds):
        started = time.monotonic()
        found = compare(spark, chosen.folder)
        took.append(round(time.monotonic() - started, 2))
    spark.stop()
    messages = json.loads((chosen.folder / "planted.json").read_text())["messages"]
    print(json.dumps({"contestant": "datacompy", "messages": messages, "seconds": took, "found": found}))


if __name__ == "__main__":
    main()
