"""Measures how long the shards of a killed node are without an owner, with many messages pending, and where it goes.

    ./scripts/test --engines bookkeeper      # once: fetches the servers' jars
    python -m benchmarks.delay.cluster.takeover [--pending 0,100000] [--shards 8] [--rounds 1] [--json]

Two nodes, as processes with their default settings, share the shards in front of `outbox broker serve`. So many
messages, due within two years, are pending in the shards of the first one, which is then killed with signal 9. For each
of these shards one message that is due at once is published to the other node until it is accepted; `slowest` is the
time from the kill until a consumer has it, of the slowest shard, `median` of the median one. The parts are from the log
of the node that takes over, of the slowest shard: `session` until ZooKeeper has ended the dead node's session and the
shard is taken, `fencing` until the dead node's ledgers are fenced and the manifest is read and named anew, `recovery`
until the schedule is read and serves, `first` until the message came. Nothing pending is the floor. Rounds are rotated;
figures are medians.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from random import Random
from typing import Final

from benchmarks.delay.cluster.arrivals import arrivals
from benchmarks.delay.cluster.servers import ClusterWatch, Servers, arguments, servers
from benchmarks.harness.report import machine, table, talk
from benchmarks.harness.rounds import rotated, spread
from benchmarks.harness.servers import broker, resident_mib
from broker_adapter.http import HttpBroker
from outbox_broker.cluster.shard_names import ShardMap
from outbox_core import Message
from outbox_core.common.errors import BrokerError
from outbox_core.messages.limits import DELAY_MAX_MS
from tests.outbox_broker.cluster.node_process import NodeProcess

BATCH: Final = 500
BODY: Final = b"x" * 512
AHEAD_MS_MIN: Final = 3_600_000
PUBLISHERS: Final = 8
PROBES: Final = "probes"
PROBE_PAUSE_SECONDS: Final = 0.02
SECONDS_MAX: Final = 240
EVENTS: Final = ("shard_taken", "shard_taken_over", "shard_opened")
PARTS: Final = ("session", "fencing", "recovery", "first")


def takeover(running: Servers, *, pending: int, shards: int, seed: str) -> dict[str, float]:
    """One takeover on a cluster of its own; seconds, and the memory of the node that took over in MiB."""
    address, config = running.new_cluster(shards=shards)
    names = ShardMap(config.generations)
    with (
        broker() as target,
        running.nodes(address, "first", "second", target=target.url) as (first, second),
        contextlib.closing(ClusterWatch(address)) as watch,
    ):
        owners = watch.wait_until_served(shards=shards, by={"first", "second"})
        ours = {shard for shard, node in owners.items() if node == "first"}
        _fill(first.url, names, ours, count=pending, seed=seed)
        probes = {shard: next(_ids(names, {shard}, Random(f"{seed}-{shard}"))) for shard in sorted(ours)}
        with arrivals(target.url, PROBES, expected=len(probes)) as deliveries:
            killed = time.time()
            first.end(signal.SIGKILL)
            _publish_probes(second.url, probes)
        came = {one.id: one.at for one in reversed(deliveries)}  # the first delivery of each
        dispatched = {shard: came[message_id] - killed for shard, message_id in probes.items()}
        seconds = sorted(dispatched.values())
        slowest = max(dispatched, key=lambda shard: dispatched[shard])
        parts = _parts(_moments(second, slowest, after=killed), killed=killed, came=came[probes[slowest]])
        return {"slowest": seconds[-1], "median_shard": seconds[len(seconds) // 2], **parts,
                "memory_mib": resident_mib(second.pid)}  # fmt: skip


def _fill(url: str, names: ShardMap, shards: set[str], *, count: int, seed: str) -> None:
    """Publish messages that are due within two years to some shards."""
    clients = [HttpBroker(url) for _ in range(PUBLISHERS)]

    def publish(number: int) -> None:
        random = Random(f"{seed}-fill-{number}")
        ids = _ids(names, shards, random)
        for _ in range(count // PUBLISHERS // BATCH):
            now_ms = time.time_ns() // 1_000_000
            _publish(
                clients[number],
                [
                    Message(id=next(ids), topic="trips", body=BODY,
                            deliver_at_ms=now_ms + AHEAD_MS_MIN + random.randrange(DELAY_MAX_MS - 2 * AHEAD_MS_MIN))
                    for _ in range(BATCH)
                ],
            )  # fmt: skip

    with ThreadPoolExecutor(PUBLISHERS) as threads:
        list(threads.map(publish, range(PUBLISHERS)))
    for client in clients:
        client.close()


def _publish_probes(url: str, probes: Mapping[str, str]) -> None:
    """Publish a message to each shard until it is accepted, each shard for itself."""

    def publish(shard: str) -> None:
        client = HttpBroker(url)
        _publish(client, [Message(id=probes[shard], topic=PROBES, body=b"")])
        client.close()

    with ThreadPoolExecutor(len(probes)) as threads:
        list(threads.map(publish, probes))


def _publish(client: HttpBroker, batch: Sequence[Message]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            client.publish(batch)
            return
        except BrokerError as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"not accepted: {error}") from error
            time.sleep(PROBE_PAUSE_SECONDS)


def _ids(names: ShardMap, shards: set[str], random: Random) -> Iterator[str]:
    while True:
        if names.shard_of(message_id := f"{random.getrandbits(128):032x}") in shards:
            yield message_id


def _moments(node: NodeProcess, shard: str, *, after: float) -> dict[str, float]:
    """When the events of a shard's takeover were, by the node's log."""
    found: dict[str, float] = {}
    for line in node.log.splitlines():
        if line.startswith("{") and (event := json.loads(line)).get("shard") == shard and event["event"] in EVENTS:
            at = datetime.fromisoformat(event["ts"]).timestamp()
            if at >= after:
                found.setdefault(event["event"], at)
    return found


def _parts(moments: Mapping[str, float], *, killed: float, came: float) -> dict[str, float]:
    ends = [killed, *(moments[event] for event in EVENTS), came]
    return {name: end - begin for name, begin, end in zip(PARTS, ends, ends[1:], strict=False)}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--pending", default="0,100000", help="messages pending in the killed node's shards")
    parser.add_argument("--shards", type=int, default=8, help="of the cluster, of which the killed node has half")
    chosen = parser.parse_args()
    sizes = [int(size) for size in chosen.pending.split(",")]
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    with servers(chosen.folder) as running:
        for number in range(chosen.rounds):
            for size in rotated(sizes, number):
                one = takeover(running, pending=size, shards=chosen.shards, seed=f"{number}-{size}")
                found[size].append(one)
                talk.print(f"{size:,} pending: {one['slowest']:.2f} s")
    results = {str(size): {key: spread([one[key] for one in of]) for key in of[0]} for size, of in found.items()}
    columns = ("slowest", "median_shard", *PARTS, "memory_mib")
    table(
        f"seconds from the kill of a node with {chosen.shards // 2} shards",
        ("pending", "slowest", "median", *PARTS, "MiB"),
        [(f"{int(size):,}", *(of[key]["median"] for key in columns)) for size, of in results.items()],
    )
    if chosen.json:
        print(json.dumps({"benchmark": "delay.cluster.takeover", "options": vars(chosen), "machine": machine(),
                          "seconds": results}, indent=2, default=str))  # fmt: skip


if __name__ == "__main__":
    main()
