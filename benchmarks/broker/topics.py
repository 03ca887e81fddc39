"""Measures the cost of many topics, groups and consumers, compared with the same work on one topic. No peers.

    python -m benchmarks.broker.topics [--topics 40000] [--rounds 5] [--quick] [--only topics,groups,fan_in,checkpoint]

topics: one message on each of 40,000 topics beside as many on one topic, in mixed batches of 500 to the embedded broker
and one request a message over HTTP. groups: bytes on disk before and after 100 groups have consumed a topic. fan_in: a
backlog drained by 1, 50 and 500 consumers of one group over HTTP, whose handlers wait 5 ms for each batch of 10.
checkpoint: how long the engine stands still while it writes one, with a message on each of 40,000 topics and 100 groups
on one more, each with 100 messages in hand.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.broker.contestants.shape import BATCH, BODY, in_threads
from benchmarks.harness import servers
from benchmarks.harness.report import machine, progress, table
from benchmarks.harness.rounds import ratio, rotated, spread
from broker_adapter.http import HttpBroker
from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_core import Broker, Message, connect

PARTS: Final = ("topics", "groups", "fan_in", "checkpoint")
HTTP_WORKERS: Final = 8
CONSUMERS: Final = (1, 50, 500)
HANDLED: Final = 10
HANDLER_SECONDS: Final = 0.005
_GROUP: Final = "bench"


def main() -> None:
    """Measure, and print."""
    chosen = _arguments()
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "topics": topics,
        "groups": groups,
        "fan_in": fan_in,
        "checkpoint": checkpoint,
    }
    results = {name: parts[name](chosen) for name in chosen.only}
    options = {"benchmark": "broker.topics", "options": vars(chosen), "machine": machine()}
    print(json.dumps({**options, "results": results}, indent=2))


def topics(chosen: argparse.Namespace) -> dict[str, Any]:
    """Messages a second on one topic, and on as many topics as there are messages."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("embedded", "http")}
    with progress() as bar:
        task = bar.add_task("topics", total=chosen.rounds * 4)
        for number in range(chosen.rounds):
            for spreading in rotated(("one", "many"), number):
                with tempfile.TemporaryDirectory(prefix="outbox-bench-topics-") as folder:
                    embedded = connect(f"embedded:{folder}/data")
                    found["embedded"][spreading].append(
                        _published(embedded, spreading, count=chosen.topics, size=BATCH)
                    )
                    embedded.close()
                    bar.advance(task)
                with servers.broker() as process:
                    client = HttpBroker(process.url)
                    found["http"][spreading].append(_published(client, spreading, count=chosen.topics, size=1))
                    client.close()
                    bar.advance(task)
    rows = [[name, *(spread(of[one])["median"] for one in ("one", "many")), ratio(of["many"], of["one"])]
            for name, of in found.items()]  # fmt: skip
    table(f"{chosen.topics:,} messages, a second", ["", "one topic", "a topic each", "ratio"], rows)
    return {
        name: {**{one: spread(values) for one, values in of.items()}, "ratio": ratio(of["many"], of["one"])}
        for name, of in found.items()
    }


def groups(chosen: argparse.Namespace) -> dict[str, Any]:
    """Bytes on disk of a topic as published, and when each of 100 groups has taken and acknowledged all of it."""
    count, wanted = (2_000, 100) if chosen.quick else (20_000, 100)
    with tempfile.TemporaryDirectory(prefix="outbox-bench-groups-") as folder:
        broker = connect(f"embedded:{folder}")
        _published(broker, "one", count=count, size=BATCH)
        before = _bytes(Path(folder))
        started = time.perf_counter()
        for number in range(wanted):
            _drain(broker, "bench", f"group-{number}", count)
        seconds = time.perf_counter() - started
        broker.close()
        after = _bytes(Path(folder))
    found = {
        "messages": count, "groups": wanted, "published_bytes": before, "consumed_bytes": after,
        "growth": round(after / before, 3), "bytes_a_delivery": round((after - before) / count / wanted, 2),
        "deliveries_per_second": round(count * wanted / seconds),
    }  # fmt: skip
    table("100 groups on one topic", ["figure", "value"], list(found.items()))
    return found


def fan_in(chosen: argparse.Namespace) -> dict[str, Any]:
    """Messages a second that 1, 50 and 500 consumers of one group handle."""
    found: dict[int, list[float]] = defaultdict(list)
    rounds = 1 if chosen.quick else chosen.rounds
    with servers.broker() as process, progress() as bar:
        client = HttpBroker(process.url, pool_size=max(CONSUMERS))
        task = bar.add_task("fan_in", total=rounds * len(CONSUMERS))
        for number in range(rounds):
            for consumers in CONSUMERS:
                count = min(1_000 * consumers, 5_000 if chosen.quick else 30_000)
                topic = f"fan-in-{number}-{consumers}"
                _published(client, "one", count=count, size=BATCH, topic=topic)
                found[consumers].append(_handled(client, topic, count=count, consumers=consumers))
                bar.advance(task)
        client.close()
    rates = {str(consumers): spread(values) for consumers, values in found.items()}
    rows = [[name, one["median"], one["median"] / rates["1"]["median"]] for name, one in rates.items()]
    table("a backlog, messages a second", ["consumers", "handled", "to one"], rows)
    return rates


def checkpoint(chosen: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and bytes of a checkpoint."""
    milliseconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="outbox-bench-checkpoint-") as folder:
        engine = Engine.open(Path(folder), options=EngineOptions(topics_max=chosen.topics + 1))
        for start in range(0, chosen.topics, BATCH):
            numbers = range(start, min(start + BATCH, chosen.topics))
            engine.publisher.publish([Message(id=f"t{one}", topic=f"t{one}", body=b"") for one in numbers])
        engine.publisher.publish([Message(id=f"m{number}", topic="shared", body=b"") for number in range(100)])
        for number in range(100):
            engine.puller.pull("shared", f"group-{number}")
        before = _bytes(Path(folder) / "actions")
        for _ in range(chosen.rounds):
            started = time.perf_counter()
            engine.writer.write_checkpoint()
            milliseconds.append((time.perf_counter() - started) * 1_000)
        size = (_bytes(Path(folder) / "actions") - before) // chosen.rounds
        engine.close()
    found = {"topics": chosen.topics, "groups": 100, "bytes": size, "milliseconds": spread(milliseconds)}
    rows = [[name, value["median"] if isinstance(value, dict) else value] for name, value in found.items()]
    table("a checkpoint", ["figure", "value"], rows)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the topics and one round")
    parser.add_argument(
        "--only", type=lambda text: [one for one in PARTS if one in text.split(",")], default=list(PARTS),
        help=f"of {','.join(PARTS)}",
    )  # fmt: skip
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.topics, chosen.rounds = chosen.topics // 10, 1
    return chosen


def _published(broker: Broker, spreading: str, *, count: int, size: int, topic: str = "bench") -> float:
    """The rate of `count` messages in batches of `size`, on one topic or each on its own."""

    def message(number: int) -> Message:
        name = topic if spreading == "one" else f"{topic}-{number}"
        return Message(id=f"{topic}-{number}", topic=name, body=BODY)

    def work(first: int, mine: int) -> None:
        for start in range(first, first + mine, size):
            broker.publish([message(number) for number in range(start, min(start + size, first + mine))])

    started = time.perf_counter()
    in_threads(work, count=count, workers=HTTP_WORKERS if size == 1 else 1)
    return count / (time.perf_counter() - started)


def _drain(broker: Broker, topic: str, group: str, count: int) -> None:
    left = count
    while left > 0:
        taken = broker.pull(topic, group, max_messages=BATCH)
        broker.ack([one.receipt for one in taken])
        left -= len(taken)


def _handled(broker: Broker, topic: str, *, count: int, consumers: int) -> float:
    handled = 0
    lock = threading.Lock()

    def consume(_first: int, _mine: int) -> None:
        nonlocal handled
        while handled < count:
            taken = broker.pull(topic, _GROUP, max_messages=HANDLED, wait_ms=200)
            if taken:
                time.sleep(HANDLER_SECONDS)
                broker.ack([one.receipt for one in taken])
                with lock:
                    handled += len(taken)

    started = time.perf_counter()
    in_threads(consume, count=consumers, workers=consumers)
    return count / (time.perf_counter() - started)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
