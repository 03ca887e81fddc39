"""Measures how late scheduled messages reach a waiting consumer, at a constant rate, compared with other brokers.

    python -m benchmarks.delay.lateness [--per-second 1000] [--seconds 30] [--only embedded,http,redis,rabbitmq]

One thread publishes batches of ten, each message due 200 to 1,200 ms later; a consumer notes the time at which it has
each, and settles it. Embedded: both are threads of the broker's process. HTTP: both are one process beside `outbox
broker serve`. Redis: a sorted set by due time, polled every 10 ms. RabbitMQ: a queue whose messages have a time to live
each, and are dead-lettered to the consumer's. All are durable before they answer. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.broker import peer_programs, servers
from benchmarks.delay.pace import figures, paced
from benchmarks.harness.report import machine
from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.http import HttpBroker
from outbox_core import Broker, Message
from outbox_core.common.clock import SystemClock

TOPIC, GROUP = "trips", "bench"
BODY: Final = b"x" * 512
_ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-second", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--only", default=",".join(_MEASURES))
    chosen = parser.parse_args()
    results = {
        name: _MEASURES[name](chosen.per_second, chosen.seconds)
        for name in chosen.only.split(",")
    }  # fmt: skip
    print(json.dumps({"benchmark": "delay.lateness", "machine": machine(), **results}, indent=2))


def _embedded(per_second: int, seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        broker = EmbeddedBroker(f"embedded:{name}/data")
        try:
            return measured(broker, broker, per_second=per_second, seconds=seconds)
        finally:
            broker.close()


def _http(per_second: int, seconds: int) -> dict[str, Any]:
    with servers.outbox_http() as peer:
        publisher, consumer = HttpBroker(peer.address), HttpBroker(peer.address)
        try:
            return measured(publisher, consumer, per_second=per_second, seconds=seconds)
        finally:
            publisher.close()
            consumer.close()


def measured(
    publisher: Broker, consumer: Broker, *, per_second: int, seconds: int, topic: str = TOPIC
) -> dict[str, Any]:
    """Publish scheduled messages at a constant rate, and consume them; returns quantiles of their lateness. The topic
    is to be a new one.
    """
    total = per_second * seconds
    late_ms: list[float] = []
    thread = threading.Thread(target=_consume, args=(consumer, topic, late_ms, total), daemon=True)
    thread.start()
    random, clock = Random(1), SystemClock()

    def publish(first: int, count: int) -> None:
        now_ms = clock.now_ms()
        publisher.publish(
            [
                Message(
                    id=f"m{first + at}", topic=topic, body=BODY, deliver_at_ms=now_ms + random.randrange(200, 1_200)
                )
                for at in range(count)
            ]
        )

    paced(publish, total=total, per_second=per_second)
    thread.join(60)
    if thread.is_alive():
        raise SystemExit(f"only {len(late_ms)} of {total} came")
    return figures(late_ms)


def _consume(consumer: Broker, topic: str, late_ms: list[float], total: int) -> None:
    while len(late_ms) < total:
        deliveries = consumer.pull(topic, GROUP, max_messages=100, wait_ms=1_000)
        now_ms = time.time_ns() / 1e6
        late_ms.extend(now_ms - (one.deliver_at_ms or 0) for one in deliveries)
        if deliveries:
            consumer.ack([one.receipt for one in deliveries])


def _peer(name: str) -> Callable[[int, int], dict[str, Any]]:
    def measured(per_second: int, seconds: int) -> dict[str, Any]:
        started = servers.redis_streams if name == "redis" else servers.rabbitmq
        with started() as peer:
            done = subprocess.run(
                [
                    peer_programs.peers_python(), "-m", "benchmarks.delay.lateness_peers", name, peer.address,
                    str(per_second), str(seconds),
                ],
                cwd=_ROOT, env={**os.environ, "PYTHONPATH": str(_ROOT)}, stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            found: dict[str, Any] = json.loads(done.stdout)
            return {"version": peer.version, **found}

    return measured


_MEASURES: Final[dict[str, Callable[[int, int], dict[str, Any]]]] = {
    "embedded": _embedded, "http": _http, "redis": _peer("redis"), "rabbitmq": _peer("rabbitmq"),
}  # fmt: skip


if __name__ == "__main__":
    main()
