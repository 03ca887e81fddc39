"""Measures the broker, embedded and over HTTP: publish and consume in batches and one by one, and recovery.

    python -m benchmarks.broker_rates [--messages 50000] [--rounds 5]

512-byte bodies, durable before each answer, one client thread, server and client on one machine. Medians of several
rounds as JSON, messages a second. Data goes to a temporary folder and is removed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox_broker.engine.engine import Engine
from outbox_core import Broker, Message, connect

BATCH = 500
SINGLES = 500
BODY = b"x" * 512
READY_SECONDS = 30.0


def main() -> None:
    """Measure, and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--messages", type=int, default=50_000)
    arguments.add_argument("--rounds", type=int, default=5)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        embedded = connect(f"embedded:{folder / 'embedded'}")
        results: dict[str, object] = {"embedded": _measure(embedded, chosen)}
        embedded.close()
        results["recovered_per_second"] = _recovery(folder / "embedded")
        with _served(folder) as url:
            over_http = connect(url)
            results["http"] = _measure(over_http, chosen)
            over_http.close()
    print(json.dumps({"body_bytes": len(BODY), "batch": BATCH, "rounds": chosen.rounds, **results}, indent=2))


def _measure(broker: Broker, chosen: argparse.Namespace) -> dict[str, int]:
    rates: dict[str, list[float]] = {}
    for number in range(chosen.rounds):
        for name, rate in _round(broker, topic=f"round-{number}", count=chosen.messages).items():
            rates.setdefault(name, []).append(rate)
    return {name: round(statistics.median(found)) for name, found in rates.items()}


def _round(broker: Broker, *, topic: str, count: int) -> dict[str, float]:
    def publish(start: int, size: int) -> None:
        broker.publish([Message(id=f"{topic}-{start + number}", topic=topic, body=BODY) for number in range(size)])

    def consume(wanted: int) -> None:
        left = wanted
        while left:
            deliveries = broker.pull(topic, "bench", max_messages=BATCH)
            broker.ack([delivery.receipt for delivery in deliveries])
            left -= len(deliveries)

    def publish_batches() -> None:
        for start in range(0, count, BATCH):
            publish(start, BATCH)

    def publish_singles() -> None:
        for number in range(SINGLES):
            publish(count + number, 1)

    return {
        "published_in_batches": _rate(publish_batches, count),
        "consumed_in_batches": _rate(lambda: consume(count), count),
        "published_one_by_one": _rate(publish_singles, SINGLES),
    }


def _rate(work: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


def _recovery(folder: Path) -> int:
    """Messages a second while a folder is opened that holds all rounds' messages and actions."""
    started = time.perf_counter()
    engine = Engine.open(folder)
    seconds = time.perf_counter() - started
    stored = sum(engine.admin.topic_figures(topic)["stored"] for topic in engine.admin.topics())
    engine.close()
    return round(stored / seconds)


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    ready = folder / "url"
    command = ["broker", "serve", "--data", str(folder / "served"), "--port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen([sys.executable, "-m", "outbox", *command], stderr=subprocess.DEVNULL)
    try:
        waiting, deadline = threading.Event(), time.monotonic() + READY_SECONDS
        while not ready.exists() and time.monotonic() < deadline:
            waiting.wait(0.05)
        yield ready.read_text().strip()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
