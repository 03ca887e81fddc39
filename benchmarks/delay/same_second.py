"""Very many messages due in the same second: the rate at which they are consumed, and what that does to another topic.

    python -m benchmarks.delay.same_second [--messages 200000]

All are published to an embedded broker, due in the same second, and are in its buckets before that second comes. Then a
consumer pulls and acknowledges them in batches of a thousand, while ten messages of another topic a second are
published, each due 50 ms later, to a consumer of their own that waits. Beside it the plain rate: as many messages of a
third topic, published for now, consumed in the same way. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.report import machine
from broker.engine import Engine
from messaging import Message

BATCH = 1_000
BODY = b"x" * 512
OTHER_EVERY_S = 0.1


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = _measure(Path(name), chosen.messages)
    print(json.dumps({"benchmark": "delay.same_second", "machine": machine(), **result}, indent=2))


def _measure(folder: Path, count: int) -> dict[str, Any]:
    engine = Engine.open(folder / "data")
    _publish(engine, "plain", count, due_ms=None)
    plain_per_s = round(count / _consume(engine, "plain", count))
    due_ms = time.time_ns() // 1_000_000 + 3_000 + count // 10
    scheduling = time.perf_counter()
    _publish(engine, "burst", count, due_ms=due_ms)
    scheduled_per_s = round(count / (time.perf_counter() - scheduling))
    ended = threading.Event()
    late_ms: list[float] = []
    threads = [
        threading.Thread(target=_publish_others, args=(engine, ended)),
        threading.Thread(target=_consume_others, args=(engine, ended, late_ms)),
    ]
    while time.time_ns() // 1_000_000 < due_ms:
        ended.wait(0.01)
    for one in threads:
        one.start()
    burst_per_s = round(count / _consume(engine, "burst", count))
    ended.set()
    for one in threads:
        one.join()
    fired = {"late_ms_p50": engine.lateness.quantile_ms(0.5), "worst_ms": engine.lateness.worst_ms}
    engine.close()
    return {
        "messages": count, "scheduled_per_s": scheduled_per_s, "delivered_per_s": burst_per_s,
        "plain_consume_per_s": plain_per_s, "share": round(burst_per_s / plain_per_s, 2), "fired": fired,
        "others": len(late_ms), "others_late_ms_p50": _quantile(late_ms, 0.5),
        "others_late_ms_p99": _quantile(late_ms, 0.99),
    }  # fmt: skip


def _publish(engine: Engine, topic: str, count: int, *, due_ms: int | None) -> None:
    for start in range(0, count, BATCH):
        engine.publish(
            [
                Message(id=f"{topic}-{start + at}", topic=topic, body=BODY, deliver_at_ms=due_ms)
                for at in range(BATCH)
            ]
        )  # fmt: skip


def _consume(engine: Engine, topic: str, count: int) -> float:
    started = time.perf_counter()
    left = count
    while left:
        deliveries = engine.pull(topic, "bench", max_messages=BATCH, wait_ms=1_000)
        engine.ack([one.receipt for one in deliveries])
        left -= len(deliveries)
    return time.perf_counter() - started


def _publish_others(engine: Engine, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(OTHER_EVERY_S):
        due_ms = time.time_ns() // 1_000_000 + 50
        engine.publish([Message(id=f"other-{number}", topic="other", body=BODY, deliver_at_ms=due_ms)])
        number += 1


def _consume_others(engine: Engine, ended: threading.Event, late_ms: list[float]) -> None:
    while not ended.is_set():
        deliveries = engine.pull("other", "bench", wait_ms=200)
        now_ms = time.time_ns() / 1e6
        late_ms.extend(now_ms - (one.deliver_at_ms or 0) for one in deliveries)
        engine.ack([one.receipt for one in deliveries])


def _quantile(found: list[float], share: float) -> float | None:
    return round(sorted(found)[min(len(found) - 1, int(share * len(found)))], 1) if found else None


if __name__ == "__main__":
    main()
