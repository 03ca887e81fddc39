"""Measures very many messages due in the same second: their consumption rate, and the effect on another topic.

    python -m benchmarks.delay.same_second [--messages 200000] [--only embedded,http]

All are published, due in the same second, and are in the broker's buckets before that second comes. Then a consumer
pulls and acknowledges them, while ten messages of another topic a second are published, each due 50 ms later, to a
consumer of their own that waits. Beside it the plain rate: as many messages of a third topic, published for now,
consumed in the same way.

Embedded: consumers and broker are threads of one process, batches are of a thousand. HTTP: `outbox broker serve`, a
process that consumes as this project's consumers do (batches of 500, acknowledged beside the next pull), and a process
for the other topic. JSON on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.broker import servers
from benchmarks.broker.contestants import outbox_http
from benchmarks.harness.report import machine
from broker_adapter.http import HttpBroker
from outbox_broker.engine.engine import Engine
from outbox_broker.engine.publisher import Publisher
from outbox_core import Broker, Delivery, Message

BATCH = 1_000
BODY = b"x" * 512
OTHER_EVERY_S = 0.1
_ROOT: Final = Path(__file__).parents[2]
Publish = Callable[[list[Message]], object]
Pull = Callable[..., list[Delivery]]
Ack = Callable[[list[str]], object]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--only", default=",".join(_MEASURES))
    parser.add_argument("--others", metavar="ADDRESS", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.others is not None:
        _others(chosen.others)
        return
    results = {name: _MEASURES[name](chosen.messages) for name in chosen.only.split(",")}
    print(json.dumps({"benchmark": "delay.same_second", "machine": machine(), **results}, indent=2))


def _embedded(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        engine = Engine.open(Path(name) / "data")
        found = _measure(
            engine.publisher,
            count,
            consume=lambda topic: _consume(engine, topic, count),
            others=_other_threads(engine.publisher.publish, engine.puller.pull, engine.settler.ack),
        )
        found["fired"] = {"late_ms_p50": engine.lateness.quantile_ms(0.5), "worst_ms": engine.lateness.worst_ms}
        engine.close()
    return found


def _http(count: int) -> dict[str, Any]:
    with (
        servers.outbox_http() as server,
        contextlib.closing(HttpBroker(server.address)) as publisher,
        contextlib.closing(outbox_http.make(server.address)) as client,
        _process(server.address) as process,
    ):
        return _measure(
            publisher, count, consume=lambda topic: client.consume(topic, count=count), others=_told_others(process)
        )


_MEASURES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {"embedded": _embedded, "http": _http}


def _measure(
    publisher: Publisher | Broker,
    count: int,
    *,
    consume: Callable[[str], None],
    others: contextlib.AbstractContextManager[list[float]],
) -> dict[str, Any]:
    """`others` is entered when the second comes, and left when all is consumed: how late the other topic's were."""
    _publish(publisher, "plain", count, due_ms=None)
    plain_per_s = round(count / _seconds(consume, "plain"))
    due_ms = time.time_ns() // 1_000_000 + 3_000 + count // 10
    scheduling = time.perf_counter()
    _publish(publisher, "burst", count, due_ms=due_ms)
    scheduled_per_s = round(count / (time.perf_counter() - scheduling))
    pause = threading.Event()
    while time.time_ns() // 1_000_000 < due_ms:
        pause.wait(0.01)
    with others as late_ms:
        burst_per_s = round(count / _seconds(consume, "burst"))
    return {
        "messages": count, "scheduled_per_s": scheduled_per_s, "delivered_per_s": burst_per_s,
        "plain_consume_per_s": plain_per_s, "share": round(burst_per_s / plain_per_s, 2), "others": len(late_ms),
        "others_late_ms_p50": _quantile(late_ms, 0.5), "others_late_ms_p99": _quantile(late_ms, 0.99),
    }  # fmt: skip


def _publish(publisher: Publisher | Broker, topic: str, count: int, *, due_ms: int | None) -> None:
    for start in range(0, count, BATCH):
        publisher.publish(
            [
                Message(id=f"{topic}-{start + at}", topic=topic, body=BODY, deliver_at_ms=due_ms)
                for at in range(BATCH)
            ]
        )  # fmt: skip


def _seconds(consume: Callable[[str], None], topic: str) -> float:
    started = time.perf_counter()
    consume(topic)
    return time.perf_counter() - started


def _consume(engine: Engine, topic: str, count: int) -> None:
    left = count
    while left:
        deliveries = engine.puller.pull(topic, "bench", max_messages=BATCH, wait_ms=1_000)
        engine.settler.ack([one.receipt for one in deliveries])
        left -= len(deliveries)


@contextlib.contextmanager
def _other_threads(publish: Publish, pull: Pull, ack: Ack) -> Iterator[list[float]]:
    """Another topic's messages and their consumer, until it is left."""
    ended = threading.Event()
    late_ms: list[float] = []
    threads = [
        threading.Thread(target=_publish_others, args=(publish, ended)),
        threading.Thread(target=_consume_others, args=(pull, ack, ended, late_ms)),
    ]
    for one in threads:
        one.start()
    try:
        yield late_ms
    finally:
        ended.set()
        for one in threads:
            one.join()


@contextlib.contextmanager
def _process(address: str) -> Iterator[subprocess.Popen[str]]:
    """A process that waits to be told to be the other topic's publisher and consumer."""
    command = [sys.executable, "-m", "benchmarks.delay.same_second", "--others", address]
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        _next_line(process)
        yield process


@contextlib.contextmanager
def _told_others(process: subprocess.Popen[str]) -> Iterator[list[float]]:
    """The same as _other_threads(), in that process."""
    late_ms: list[float] = []
    _tell(process)
    try:
        yield late_ms
    finally:
        _tell(process)
        late_ms += json.loads(_next_line(process))


def _others(address: str) -> None:
    """That process."""
    with contextlib.closing(HttpBroker(address)) as broker:
        print("ready", flush=True)
        sys.stdin.readline()
        with _other_threads(broker.publish, broker.pull, broker.ack) as late_ms:
            sys.stdin.readline()
        print(json.dumps(late_ms), flush=True)


def _tell(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.write("now\n")
        process.stdin.flush()


def _next_line(process: subprocess.Popen[str]) -> str:
    return "" if process.stdout is None else process.stdout.readline()


def _publish_others(publish: Publish, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(OTHER_EVERY_S):
        due_ms = time.time_ns() // 1_000_000 + 50
        publish([Message(id=f"other-{number}", topic="other", body=BODY, deliver_at_ms=due_ms)])
        number += 1


def _consume_others(pull: Pull, ack: Ack, ended: threading.Event, late_ms: list[float]) -> None:
    while not ended.is_set():
        deliveries = pull("other", "bench", wait_ms=200)
        now_ms = time.time_ns() / 1e6
        late_ms.extend(now_ms - (one.deliver_at_ms or 0) for one in deliveries)
        ack([one.receipt for one in deliveries])


def _quantile(found: list[float], share: float) -> float | None:
    return round(sorted(found)[min(len(found) - 1, int(share * len(found)))], 1) if found else None


if __name__ == "__main__":
    main()
