"""How late messages are handed to the target of the schedule's service, at a steady rate.

    python -m benchmarks.delay.lateness [--per-second 1000] [--seconds 30]

One thread schedules batches of ten, each message due 200 to 1,200 ms later; the target only notes the time.
JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.harness.report import machine
from broker.delay.local_segments import LocalSegmentStore
from broker.delay.service import DelayService
from broker.delay.store import DelayStore, Timed
from messaging.clock import SystemClock

BATCH = 10


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-second", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=30)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        late = sorted(_measure(Path(name), per_second=chosen.per_second, seconds=chosen.seconds))
    shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    figures = {name: late[min(len(late) - 1, int(share * len(late)))] for name, share in shares.items()}
    result = {"messages": len(late), "late_ms": {**figures, "max": late[-1], "min": late[0]}}
    print(json.dumps({"benchmark": "delay.lateness", "machine": machine(), **result}, indent=2))


def _measure(folder: Path, *, per_second: int, seconds: int) -> list[float]:
    store = LocalSegmentStore.open(folder / "delay")
    schedule = DelayStore.open(store)
    late: list[float] = []
    total = per_second * seconds
    done = threading.Event()

    def deliver(batch: Sequence[Timed]) -> list[Timed]:
        now_us = time.time_ns() // 1_000
        late.extend(now_us / 1_000 - one.due_ms for one in batch)
        if len(late) >= total:
            done.set()
        return []

    service = DelayService(schedule, deliver=deliver, clock=SystemClock())
    service.start()
    random, pause, started = Random(1), threading.Event(), time.perf_counter()
    for number in range(0, total, BATCH):
        now_ms = time.time_ns() // 1_000_000
        batch = [
            Timed(now_ms + random.randrange(200, 1_200), f"m{number + at}", "trips", b"x" * 512) for at in range(BATCH)
        ]
        schedule.schedule(batch, now_ms=now_ms)
        service.wake()
        pause.wait(max(0.0, started + number / per_second - time.perf_counter()))
    if not done.wait(60):
        raise SystemExit(f"only {len(late)} of {total} came")
    service.stop()
    schedule.close()
    store.close()
    return late


if __name__ == "__main__":
    main()
