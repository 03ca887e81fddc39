"""Measures how late messages come through a delay cluster at a constant rate, beside one process, and a node's memory.

    ./scripts/test --engines bookkeeper      # once: fetches the servers' jars
    python -m benchmarks.delay.cluster.lateness [--per-second 1000] [--seconds 20] [--shards 8] [--rounds 1] [--json]

One thread publishes batches of ten over HTTP, each message of 512 bytes due 200 to 1,200 ms later; a consumer of the
target, `outbox broker serve`, notes the time at which it has each, and settles it. `cluster` is two nodes, as processes
with their default settings, whose shards are on three bookies: three copies, two acknowledgements; the client knows one
of the nodes. `process`, the floor, is `outbox delay serve --data` in front of the same broker. Memory is the largest
resident set of a node, with its JVM, in the second tenth of the time and in the last one: equal where it does not grow,
which takes `--seconds 3600`. Rounds are rotated; figures are medians.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.delay.cluster.arrivals import arrivals
from benchmarks.delay.cluster.servers import ClusterWatch, Servers, arguments, servers
from benchmarks.delay.pace import paced
from benchmarks.harness.report import machine, table, talk
from benchmarks.harness.rounds import percentiles, rotated, spread
from benchmarks.harness.servers import broker, delay_process, resident_mib
from broker_adapter.http import HttpBroker
from outbox_core import Message

TOPIC: Final = "trips"
BODY: Final = b"x" * 512
DUE_MS: Final = (200, 1_200)
KINDS: Final = ("cluster", "process")
SAMPLE_SECONDS: Final = 1.0


def through_cluster(running: Servers, *, shards: int, per_second: int, seconds: int) -> dict[str, float]:
    """One round through two nodes."""
    address, _ = running.new_cluster(shards=shards)
    with broker() as target, running.nodes(address, "first", "second", target=target.url) as nodes:
        with contextlib.closing(ClusterWatch(address)) as watch:
            watch.wait_until_served(shards=shards, by={"first", "second"})
        with memory([node.pid for node in nodes]) as samples:
            found = lateness(nodes[0].url, target.url, per_second=per_second, seconds=seconds)
        return {**found, **early_and_late(samples)}


def through_process(folder: Path, *, per_second: int, seconds: int) -> dict[str, float]:
    """One round through one process with a disk of its own."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as data,
        broker() as target,
        delay_process(Path(data), target=target.url) as process,
    ):
        with memory([process.pid]) as samples:
            found = lateness(process.url, target.url, per_second=per_second, seconds=seconds)
        return {**found, **early_and_late(samples)}


@contextlib.contextmanager
def memory(pids: Sequence[int]) -> Iterator[list[float]]:
    """Yields a list that grows each second by the memory of the largest of these processes, in MiB."""
    samples: list[float] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            samples.append(max(map(resident_mib, pids)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def early_and_late(samples: Sequence[float]) -> dict[str, float]:
    """Returns the largest samples of the second and of the last tenth."""
    tenth = len(samples) // 10
    return {"early_memory_mib": max(samples[tenth : 2 * tenth + 1]), "memory_mib": max(samples[-tenth - 1 :])}


def lateness(url: str, target: str, *, per_second: int, seconds: int) -> dict[str, float]:
    """Publish to `url` and consume from `target`; returns quantiles of the lateness."""
    total, random = per_second * seconds, Random(1)
    with contextlib.closing(HttpBroker(url)) as publisher, arrivals(target, TOPIC, expected=total) as came:

        def publish(first: int, count: int) -> None:
            now_ms = time.time_ns() // 1_000_000
            dues = [now_ms + random.randrange(*DUE_MS) for _ in range(count)]
            publisher.publish(
                [
                    Message(id=f"m{number}", topic=TOPIC, body=BODY, deliver_at_ms=due_ms)
                    for number, due_ms in enumerate(dues, first)
                ]
            )

        paced(publish, total=total, per_second=per_second)
    late_ms = [one.at * 1_000 - one.due_ms for one in came]
    return {**percentiles(late_ms), "min_ms": min(late_ms)}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--per-second", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--shards", type=int, default=8, help="of the cluster")
    parser.add_argument("--only", choices=KINDS, help="one of them alone")
    chosen = parser.parse_args()
    pace = {"per_second": chosen.per_second, "seconds": chosen.seconds}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with servers(chosen.folder) as running:
        for number in range(chosen.rounds):
            for kind in rotated([chosen.only] if chosen.only else KINDS, number):
                if kind == "cluster":
                    found[kind].append(through_cluster(running, shards=chosen.shards, **pace))
                else:
                    found[kind].append(through_process(running.folder, **pace))
                talk.print(f"{kind}: p99 {found[kind][-1]['p99_ms']:.1f} ms")
    results: dict[str, Any] = {
        kind: {key: spread([one[key] for one in of]) for key in of[0]} for kind, of in found.items()
    }
    columns = ("p50_ms", "p90_ms", "p99_ms", "max_ms", "min_ms", "early_memory_mib", "memory_mib")
    table(
        f"lateness in ms at {chosen.per_second:,} messages a second, and MiB of a node",
        ("kind", "p50", "p90", "p99", "max", "min", "MiB early", "MiB late"),
        [(kind, *(of[key]["median"] for key in columns)) for kind, of in results.items()],
    )
    if chosen.json:
        print(json.dumps({"benchmark": "delay.cluster.lateness", "options": vars(chosen), "machine": machine(),
                          **results}, indent=2, default=str))  # fmt: skip


if __name__ == "__main__":
    main()
