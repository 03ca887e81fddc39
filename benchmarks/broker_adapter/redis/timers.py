"""The timer store with many timers pending: adds, and deliveries with their acks, a second; commands a timer; memory.

    python -m benchmarks.broker_adapter.redis.timers [--pending 100000] [--due 20000] [--rounds 3] [--fsync always]

512-byte bodies, one thread, batches of 500, a topic of one slot on one server. `add` schedules an hour ahead, beside
the timers that are pending. `fire_take_ack` pulls what came due meanwhile, and acknowledges it. Figures are timers a
second, medians over the rounds. With one slot each call is one round trip, so round trips a timer are calls a timer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.harness.report import machine, table
from benchmarks.harness.rounds import spread
from broker_adapter.redis import open_broker
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import Message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server

BATCH: Final = 500
BODY: Final = b"x" * 512
TOPIC: Final = "bench"
HOUR_MS: Final = 3_600_000


def add(broker: Broker, count: int, *, deliver_at_ms: int) -> float:
    """Schedule so many; how many a second."""
    batches = [
        [Message(id=new_message_id(), topic=TOPIC, body=BODY, deliver_at_ms=deliver_at_ms) for _ in range(BATCH)]
        for _ in range(count // BATCH)
    ]
    begun = time.perf_counter()
    for batch in batches:
        assert all(one.status.is_success for one in broker.publish(batch))
    return count / (time.perf_counter() - begun)


def fire_take_ack(broker: Broker, count: int) -> tuple[float, int]:
    """Pull and acknowledge so many that are due; how many a second, and by how many calls."""
    calls, left = 0, count
    begun = time.perf_counter()
    while left:
        deliveries = broker.pull(TOPIC, "g", max_messages=BATCH, wait_ms=1_000)
        broker.ack([one.receipt for one in deliveries])
        left -= len(deliveries)
        calls += 2
    return count / (time.perf_counter() - begun), calls


@contextlib.contextmanager
def commands(server: RedisServer, found: list[int]) -> Iterator[None]:
    """Count the scripts and WAITs that the server was sent during a block."""
    server.ask("CONFIG", "RESETSTAT")
    yield
    with contextlib.closing(server.client) as client:
        stats: Any = client.info("commandstats")
    found.append(sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "wait")))


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds on one server, each beside the same number of pending timers or some more."""
    rates: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, list[int]] = defaultdict(list)
    calls: list[int] = []
    with redis_server(appendfsync=chosen.fsync) as server:
        broker = open_broker(f"redis://{HOST}:{server.port}/?store=timers&wait=0")
        before = memory_bytes(server)
        add(broker, chosen.pending, deliver_at_ms=time.time_ns() // 1_000_000 + HOUR_MS)
        bytes_each = (memory_bytes(server) - before) / chosen.pending
        for _ in range(chosen.rounds):
            with commands(server, sent["add"]):
                rates["add"].append(add(broker, chosen.due, deliver_at_ms=time.time_ns() // 1_000_000 + HOUR_MS))
            make_due(server, chosen.due)
            with commands(server, sent["fire_take_ack"]):
                rate, made = fire_take_ack(broker, chosen.due)
            rates["fire_take_ack"].append(rate)
            calls.append(made)
        broker.close()
    return {
        "per_second": {name: spread(values) for name, values in rates.items()},
        "commands_a_timer": {name: max(counts) / chosen.due for name, counts in sent.items()},
        "round_trips_a_timer": {"add": 1 / BATCH, "fire_take_ack": max(calls) / chosen.due},
        "bytes_a_pending_timer": bytes_each,
    }


def make_due(server: RedisServer, count: int) -> None:
    """Let so many of those that are pending be due: by their scores, so that nobody waits an hour."""
    key = f"outbox:timers:{{{TOPIC}:0}}:store"
    with contextlib.closing(server.client) as client:
        client.zadd(key, dict.fromkeys(client.zrange(key, 0, count - 1), 1), xx=True)


def memory_bytes(server: RedisServer) -> int:
    """What the server has allocated."""
    with contextlib.closing(server.client) as client:
        info: Any = client.info("memory")
    return int(info["used_memory"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pending", type=int, default=100_000)
    parser.add_argument("--due", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fsync", choices=("always", "everysec"), default="always")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    results = measure(chosen)
    rows = [
        (name, found["median"], found["min"], found["max"], results["commands_a_timer"][name],
         results["round_trips_a_timer"][name])
        for name, found in results["per_second"].items()
    ]  # fmt: skip
    table("timers a second", ("what", "median", "min", "max", "commands a timer", "round trips a timer"), rows)
    print(f"{results['bytes_a_pending_timer']:.0f} bytes of memory a pending timer")
    if chosen.json:
        print(
            json.dumps(
                {"benchmark": "redis_timers", "options": vars(chosen), "machine": machine(), **results}, indent=2
            )
        )


if __name__ == "__main__":
    main()
