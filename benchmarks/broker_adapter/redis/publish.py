"""The adapter for Redis beside the plainest fast program: redis-py's pipeline of XADD, at equal durability.

    python -m benchmarks.broker_adapter.redis.publish [--rounds 7] [--batches 100] [--singles 2000] [--json]

512-byte bodies; appendonly yes, appendfsync always; `--replica` adds a replica and WAIT 1 for both. The order of the
contestants rotates from round to round; figures are messages a second, medians over the rounds, and the ratio is the
median of the rounds' ratios. The plain program knows no repeats; `plain_dedup` drops them by a SET NX for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis

from benchmarks.harness.report import machine, table
from benchmarks.harness.rounds import ratio, rotated, spread
from broker_adapter.redis import open_broker
from outbox_core.messages.message import Message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, replica_of

BATCH: Final = 500
BODY: Final = b"x" * 512
Publish = Callable[[str, list[str]], None]


def adapter(port: int, *, replicas: int) -> Publish:
    """Ours."""
    broker = open_broker(f"redis://{HOST}:{port}/?wait={replicas}")

    def publish(topic: str, ids: list[str]) -> None:
        results = broker.publish([Message(id=one, topic=topic, body=BODY, key="k", created_at_ms=1) for one in ids])
        assert all(one.status.is_success for one in results)

    return publish


def plain(port: int, *, replicas: int, dedup: bool = False) -> Publish:
    """A pipeline of XADD with the same fields, and WAIT where there are replicas."""
    client: Any = redis.Redis(host=HOST, port=port, protocol=2)

    def publish(topic: str, ids: list[str]) -> None:
        pipeline = client.pipeline(transaction=False)
        for one in ids:
            if dedup:
                pipeline.set(f"{topic}:{one}", 1, nx=True, px=3_600_000)
            pipeline.xadd(topic, {"id": one, "key": "k", "body": BODY, "created-at-ms": "1"})
        if replicas:
            pipeline.wait(replicas, 8_000)
        answers = pipeline.execute()
        assert not replicas or answers[-1] >= replicas

    return publish


def rate(publish: Publish, server: RedisServer, *, calls: int, size: int) -> float:
    """Messages a second on a topic of its own, which is deleted afterwards."""
    topic = f"bench.{uuid.uuid4().hex}"
    batches = [[f"{number}-{place}" for place in range(size)] for number in range(calls)]
    publish(topic, ["first"])
    begun = time.perf_counter()
    for ids in batches:
        publish(topic, ids)
    took_s = time.perf_counter() - begun
    server.ask("FLUSHALL")
    return calls * size / took_s


@contextlib.contextmanager
def servers(*, with_replica: bool) -> Iterator[RedisServer]:
    """A durable server, with a replica where that is asked for."""
    with redis_server() as server, replica_of(server) if with_replica else contextlib.nullcontext():
        yield server


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds."""
    found: dict[str, dict[str, list[float]]] = {"batches_of_500": defaultdict(list), "one_at_a_time": defaultdict(list)}
    with servers(with_replica=chosen.replica) as server:
        replicas = int(chosen.replica)
        contestants = {
            "adapter": adapter(server.port, replicas=replicas),
            "plain": plain(server.port, replicas=replicas),
            "plain_dedup": plain(server.port, replicas=replicas, dedup=True),
        }
        for number in range(chosen.rounds):
            for name in rotated(list(contestants), number):
                publish = contestants[name]
                found["batches_of_500"][name].append(rate(publish, server, calls=chosen.batches, size=BATCH))
                found["one_at_a_time"][name].append(rate(publish, server, calls=chosen.singles, size=1))
    return {
        what: {
            "per_second": {name: spread(values) for name, values in rates.items()},
            "adapter_to_plain": ratio(rates["adapter"], rates["plain"]),
            "adapter_to_plain_dedup": ratio(rates["adapter"], rates["plain_dedup"]),
        }
        for what, rates in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--singles", type=int, default=2_000)
    parser.add_argument("--replica", action="store_true", help="with a replica, and WAIT 1")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    results = measure(chosen)
    rows = [
        (what, name, rates["median"], rates["min"], rates["max"])
        for what, figures in results.items()
        for name, rates in figures["per_second"].items()
    ]
    table("messages a second", ("what", "who", "median", "min", "max"), rows)
    if chosen.json:
        print(
            json.dumps(
                {"benchmark": "redis_publish", "options": vars(chosen), "machine": machine(), **results}, indent=2
            )
        )


if __name__ == "__main__":
    main()
