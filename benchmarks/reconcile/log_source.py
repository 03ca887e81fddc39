"""Measures Spark's reads of the broker's message log, in place and cached, and of the same records in Parquet.

    python -m benchmarks.reconcile.log_source --messages 1000000 --folder scratch

Each is scanned whole for a sum over every column that the reconciliation uses, on two cores; rounds alternate. `kept`
are segments behind which another stands, as a run by windows finds them when it has read them before; `keeping` is the
time that it took to keep them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.reconcile.records import START_MS
from outbox_core.journal.block import FrameKind, SegmentHead, SegmentKind, block, framed
from outbox_core.messages.message import Record, encode_packed
from spark_reconcile.sources import segment_cache
from spark_reconcile.sources.broker_logs import survey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORDS_A_SEGMENT = 100_000
BODY = b'{"order_id": 123456, "origin": "JFK", "dest": "LAX", "carrier": "UA", "amount_cents": 31900}'
SUMS = ("xxhash64(id)", "xxhash64(topic)", "xxhash64(message_key)", "xxhash64(body_sha256)", "stored_ms", "sequence")


def write_log(folder: Path, messages: int, *, together: int) -> None:
    """Segments as the broker writes them, `together` messages a block."""
    folder.mkdir(parents=True)
    first = 0
    for segment_number, start in enumerate(range(0, messages, RECORDS_A_SEGMENT), start=1):
        head = SegmentHead(kind=SegmentKind.MESSAGES, epoch=1, first=first, created_at_ms=START_MS)
        blocks = _blocks(start, min(start + RECORDS_A_SEGMENT, messages), first=first, together=together)
        (folder / f"messages-{segment_number:012d}.segment").write_bytes(head.encode() + blocks)
        first += len(blocks)


def _blocks(start: int, end: int, *, first: int, together: int) -> bytes:
    data, frames_before = bytearray(), 0
    for number in range(start, end, together):
        numbers = range(number, min(number + together, end))
        frames = framed(FrameKind.MESSAGE, numbers, [encode_packed(_record(one)) for one in numbers])
        at_ms = START_MS + numbers[-1] * 24
        # As of a broker that syncs each block before the next one.
        offset = first + len(data)
        data += block(frames, offset=offset, durable=offset, at_ms=at_ms, frames_before=frames_before)
        frames_before = len(frames)
    return bytes(data)


def _record(number: int) -> Record:
    created_ms = START_MS + number * 24
    return Record(
        id=f"{created_ms:012x}7abc8{number:015x}", topic="trip.booked.jfk", key=str(number),
        headers={"content-type": "application/json"}, body=BODY, created_at_ms=created_ms,
    )  # fmt: skip


def scan(frame: DataFrame) -> float:
    """Seconds for one pass."""
    from pyspark.sql.functions import expr

    started = time.monotonic()
    frame.agg(*(expr(f"sum({one} & 4294967295L)") for one in SUMS)).collect()
    return round(time.monotonic() - started, 2)


def measure(folder: Path, messages: int, rounds: int, *, together: int) -> dict[str, Any]:
    """Rounds of both."""
    from spark_reconcile.load.spark_session import spark_session

    write_log(folder / "messages", messages, together=together)
    segments = survey(folder, "messages")
    with spark_session("local[2]", log=folder / "spark.log") as spark:
        log = (
            spark.read.format("outbox_broker_log")
            .option("log", "messages")
            .option("segments", msgspec.json.encode(segments).decode())
            .load()
        )
        log.write.parquet(str(folder / "parquet"))
        parquet = spark.read.parquet(str(folder / "parquet"))
        (folder / "kept").mkdir()
        started = time.monotonic()
        segment_cache.keep(log, folder / "kept", segments)
        keeping = round(time.monotonic() - started, 2)
        kept = spark.read.schema(parquet.schema).parquet(*map(str, sorted((folder / "kept").glob("*.parquet"))))
        took: dict[str, list[float]] = {"log": [], "kept": [], "parquet": []}
        for _ in range(rounds):
            for name, frame in {"log": log, "kept": kept, "parquet": parquet}.items():
                took[name].append(scan(frame))
    rates = {name: round(messages / min(seconds)) for name, seconds in took.items()}
    ratios = {name: round(rates[name] / rates["parquet"], 3) for name in ("log", "kept")}
    size = sum(one.size_bytes for one in segments)
    return {"seconds": took, "keeping_seconds": keeping, "rows_a_second": rates, "ratios": ratios, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--together", type=int, default=500, help="messages a block")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    scratch = chosen.folder / "log-source"
    try:
        found = measure(scratch, chosen.messages, chosen.rounds, together=chosen.together)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(
        json.dumps(
            {
                "benchmark": "log_source",
                "messages": chosen.messages,
                "together": chosen.together,
                **found,
                "load": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
