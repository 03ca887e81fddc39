"""Very many messages due in the same second: the rate at which they come, and what that does to another topic.

    python -m benchmarks.delay.same_second [--messages 200000]

All are scheduled and flushed to their bucket first. Then the schedule's service hands them to a target that stores each
batch in an embedded engine, while a thread schedules ten messages of another topic a second, each due 50 ms later. The
plain consume rate beside it is the engine's own, pull and ack in batches of the same size. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.report import machine
from broker.delay.local_segments import LocalSegmentStore
from broker.delay.service import DelayService
from broker.delay.store import DelayStore, Timed
from broker.engine import Engine
from messaging import Message
from messaging.clock import SystemClock

BATCH = 1_000
BODY = b"x" * 512


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = _measure(Path(name), chosen.messages)
    print(json.dumps({"benchmark": "delay.same_second", "machine": machine(), **result}, indent=2))


def _measure(folder: Path, count: int) -> dict[str, object]:
    store = LocalSegmentStore.open(folder / "delay")
    schedule = DelayStore.open(store)
    engine = Engine.open(folder / "target")
    due_ms = time.time_ns() // 1_000_000
    for start in range(0, count, BATCH):
        batch = [Timed(due_ms, f"burst-{start + at}", "burst", BODY) for at in range(BATCH)]
        schedule.schedule(batch, now_ms=due_ms - 3_600_000)
    arrived, others = threading.Event(), []
    left = count

    def deliver(batch: Sequence[Timed]) -> list[Timed]:
        nonlocal left
        engine.publish([Message(id=one.id, topic=one.topic, body=one.payload) for one in batch])
        now_ms = time.time_ns() // 1_000_000
        others.extend(now_ms - one.due_ms for one in batch if one.topic == "other")
        left -= sum(one.topic == "burst" for one in batch)
        if left == 0:
            arrived.set()
        return []

    service = DelayService(schedule, deliver=deliver, clock=SystemClock())
    started = time.perf_counter()
    service.start()
    number = 0
    while not arrived.wait(0.1):
        now_ms = time.time_ns() // 1_000_000
        schedule.schedule([Timed(now_ms + 50, f"other-{number}", "other", BODY)], now_ms=now_ms)
        service.wake()
        number += 1
    seconds = time.perf_counter() - started
    service.stop()
    schedule.close()
    store.close()
    consumed = _consume(engine, count)
    engine.close()
    return {
        "messages": count,
        "delivered_per_s": round(count / seconds),
        "plain_consume_per_s": consumed,
        "others": len(others),
        "others_late_ms_p50": _quantile(others, 0.5),
        "others_late_ms_p99": _quantile(others, 0.99),
    }


def _consume(engine: Engine, count: int) -> int:
    started = time.perf_counter()
    left = count
    while left:
        deliveries = engine.pull("burst", "bench", max_messages=BATCH)
        engine.ack([one.receipt for one in deliveries])
        left -= len(deliveries)
    return round(count / (time.perf_counter() - started))


def _quantile(found: list[int], share: float) -> int | None:
    return sorted(found)[min(len(found) - 1, int(share * len(found)))] if found else None


if __name__ == "__main__":
    main()
