"""Measures scheduled publishes to a delay cluster of 1, 8 and 64 shards beside the local store, and what they cost.

    ./scripts/test --engines bookkeeper      # once: fetches the servers' jars
    python -m benchmarks.delay.cluster.publish_rates [--messages 300000] [--shards 1,8,64] [--rounds 1] [--json]

Threads of this process publish batches of 500 messages of 512 bytes, due within two years, to a schedule on the local
disk, and to a node whose shards are on three bookies on the same disk: three copies, two acknowledgements. Both have
their default memory, which is flushed to buckets once in 65,536 messages (local) and in up to 250,000 (a node, however
many shards it has); the rate is up to the last answer. `one_ledger` is the floor: as many bytes in entries of the same
size, to one ledger. Costs are of a million messages: what the shards' logs and manifests take and, of what was flushed,
the buckets with the id index, in ledgers, entries and bytes before copies; `znodes` are those that a round left, and
`zookeeper_writes` its transactions. `client_cpu_us` is processor time a message of this process, which makes, publishes
and schedules it, and `servers_cpu_us` that of the bookies and ZooKeeper, flushes included. Rounds are rotated; figures
are medians, ratios are to the local store.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, Final
from uuid import UUID

from kazoo.client import KazooClient

from benchmarks.contestants.ours import AcceptingBroker
from benchmarks.delay.cluster.counted_ledgers import CountedLedgers
from benchmarks.delay.cluster.servers import SESSION_MS, Servers, arguments, servers
from benchmarks.harness.report import machine, table, talk
from benchmarks.harness.rounds import ratio, rotated, spread
from benchmarks.harness.servers import children_cpu_seconds
from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.cluster.coordinator import CoordinatorOptions
from outbox_broker.cluster.shard_host import OpenedShard
from outbox_broker.delay_service.cluster_node import ClusterNode, NodeOptions
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.delay_service.target_publisher import timed
from outbox_broker.log.storage import DiskStorage
from outbox_broker.log.sync_times import TimedStorage
from outbox_broker.schedule.delay_store import DelayStore
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_takeover import Shard
from outbox_broker.segments.local import LocalSegments
from outbox_core import Message
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerError
from outbox_core.messages.limits import DELAY_MAX_MS
from outbox_core.zookeeper.zookeeper_session import SessionOptions

BATCH: Final = 500
BODY: Final = b"x" * 512
ID_BYTES: Final = 36
AHEAD_MS_MIN: Final = 3_600_000
"""None falls due while it is measured."""
LOCAL: Final = "local"
FLOOR: Final = "one_ledger"
SETTLE_SECONDS: Final = 2
SETTLE_SECONDS_MAX: Final = 120
SERVED_SECONDS_MAX: Final = 120
WARM_UPS: Final = 3
WARM_UP_MESSAGES: Final = 20_000
MILLION: Final = 1_000_000

Publish = Callable[[Sequence[Message]], object]


class Contest:
    """All contestants on the same servers. A round of one opens a schedule of its own, and closes it."""

    def __init__(self, running: Servers, ledgers: JavaLedgers, zookeeper: KazooClient, *, messages: int, threads: int):
        self._servers = running
        self._ledgers = ledgers
        self._zookeeper = zookeeper
        self._messages = messages
        self._threads = threads
        self._rounds = 0

    def run(self, name: str) -> dict[str, float]:
        """One round; returns `per_s` and processor time a message, and for a cluster what a million messages cost."""
        self._rounds += 1
        client, others = time.process_time(), children_cpu_seconds()
        found = self._round(name)
        return {
            **found,
            "client_cpu_us": (time.process_time() - client) / self._messages * MILLION,
            "servers_cpu_us": (children_cpu_seconds() - others) / self._messages * MILLION,
        }

    def _round(self, name: str) -> dict[str, float]:
        if name == FLOOR:
            return {"per_s": self._to_one_ledger(messages=self._messages)}
        if name == LOCAL:
            with _local_store(self._servers.folder) as publish:
                return {"per_s": self._published(publish, messages=self._messages)}
        return self._to_cluster(int(name.removesuffix(" shards").removesuffix(" shard")))

    def warm_up(self) -> None:
        """Open the connections to the bookies, and compile what is used."""
        for _ in range(WARM_UPS):
            self._to_one_ledger(messages=WARM_UP_MESSAGES)

    def _to_cluster(self, shards: int) -> dict[str, float]:
        counted, znodes, writes = CountedLedgers(self._ledgers), self._znodes(), self._zookeeper_writes()
        with self._node(counted, shards=shards) as node:
            producers, measured = node.served().producers, node.served().measured
            per_s = self._published(lambda batch: producers.publish(batch, quota=None), messages=self._messages)
            _wait_until_settled(counted)
            in_memory_bytes = measured.log_figures()["messages_bytes"]
            writes = self._zookeeper_writes() - writes
        flushed = max(0, self._messages - in_memory_bytes // _PAYLOAD_BYTES)
        return {"per_s": per_s, "flushed": flushed, "znodes": self._znodes() - znodes, "zookeeper_writes": writes,
                **_costs(counted.counts, published=self._messages, flushed=flushed)}  # fmt: skip

    @contextlib.contextmanager
    def _node(self, counted: CountedLedgers, *, shards: int) -> Iterator[ClusterNode]:
        address, config = self._servers.new_cluster(shards=shards)
        manifests = ShardZnodes(self._zookeeper, address.root, request_ms_max=SESSION_MS)

        def open_shard(name: str) -> OpenedShard:
            store = LedgerSegments.open(
                Shard(cluster=config.cluster, name=name, ledgers=counted, manifests=manifests, clock=SystemClock())
            )
            return OpenedShard(store=store, epoch=store.epoch, annotations=store.annotations, close=store.close)

        session = SessionOptions(session_ms=SESSION_MS, request_ms_max=SESSION_MS)
        options = NodeOptions(
            address=address, name="bench", url="http://127.0.0.1:1", version="bench", session=session,
            coordinator=CoordinatorOptions(drain_ms_max=0),
        )  # fmt: skip
        node = ClusterNode(options, open_shard=open_shard, target=AcceptingBroker())
        try:
            node.start()
            _wait_until(lambda: _is_served(node, shards=shards), seconds_max=SERVED_SECONDS_MAX)
            yield node
        finally:
            node.close()

    def _to_one_ledger(self, *, messages: int) -> float:
        writer = self._ledgers.begin_create({"outbox-segment": b"floor"})()
        entry, guard, sent = (BODY + b"i" * ID_BYTES) * BATCH, threading.Lock(), 0

        def append(_: Sequence[Message]) -> None:
            nonlocal sent
            with guard:
                writer.append(entry)
                sent += 1
                count = sent
            writer.confirm(count)

        per_s = self._published(append, messages=messages)
        writer.begin_close()()
        self._ledgers.delete([writer.ledger_id])
        return per_s

    def _published(self, publish: Publish, *, messages: int) -> float:
        """Publish messages; returns how many a second."""
        share = messages // self._threads // BATCH * BATCH
        with ThreadPoolExecutor(self._threads) as threads:
            begun = time.perf_counter()
            seeds = [f"{self._rounds}-{thread}" for thread in range(self._threads)]
            for done in [threads.submit(_publish_share, publish, Random(seed), share) for seed in seeds]:
                done.result()
            return share * self._threads / (time.perf_counter() - begun)

    def _zookeeper_writes(self) -> int:
        """The number of ZooKeeper's last transaction, within its leader's time."""
        _, stat = self._zookeeper.create("/mark-", ephemeral=True, sequence=True, include_data=True)
        return int(stat.czxid) & 0xFFFFFFFF

    def _znodes(self) -> int:
        """All znodes of the servers."""
        total, level = 0, ["/"]
        while level:
            answers = [self._zookeeper.get_children_async(path) for path in level]
            level = [
                f"{path.rstrip('/')}/{child}"
                for path, answer in zip(level, answers, strict=True)
                for child in answer.get()
            ]
            total += len(level)
        return total


@contextlib.contextmanager
def _local_store(folder: Path) -> Iterator[Publish]:
    """A schedule as `outbox delay serve --data` has it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="local-") as name:
        syncs = TimedStorage(DiskStorage(), clock_s=time.perf_counter)
        store = LocalSegments.open(Path(name), storage=syncs)
        proxy = DelayProxy(DelayStore.open(store), AcceptingBroker(), clock=SystemClock(), syncs=syncs)
        proxy.start()
        try:
            yield proxy.publish
        finally:
            proxy.close()
            store.close()


def _publish_share(publish: Publish, random: Random, messages: int) -> None:
    for _ in range(messages // BATCH):
        now_ms = time.time_ns() // 1_000_000
        batch = [_message(random, now_ms) for _ in range(BATCH)]
        while True:
            try:
                publish(batch)
                break
            except BrokerError:  # as a client does: publishing is idempotent
                time.sleep(0.01)


def _message(random: Random, now_ms: int) -> Message:
    return Message(
        id=str(UUID(int=random.getrandbits(128))), topic="trips", body=BODY, created_at_ms=now_ms,
        deliver_at_ms=now_ms + AHEAD_MS_MIN + random.randrange(DELAY_MAX_MS - AHEAD_MS_MIN),
    )  # fmt: skip


_PAYLOAD_BYTES: Final = len(timed(_message(Random(0), time.time_ns() // 1_000_000), 0).payload)


def _costs(counts: Counter[tuple[str, str]], *, published: int, flushed: int) -> dict[str, float]:
    """What a million messages cost."""
    found: dict[str, float] = {}
    for kind, messages in {"log": published, "manifest": published, "buckets": flushed}.items():
        for what in ("ledgers", "entries", "bytes"):
            found[f"{kind}_{what}"] = round(counts[kind, what] * MILLION / messages) if messages >= 1 else 0
    found["ledgers_deleted"] = counts["all", "deleted"]
    return found


def _is_served(node: ClusterNode, *, shards: int) -> bool:
    view = node.coordinator.view()
    return sum(owner.state == "serving" for owner in view.owners.values()) == shards


def _wait_until_settled(counted: CountedLedgers) -> None:
    """Wait until nothing was written for some time: flushes go on after the last answer."""
    seen, since = counted.counts.copy(), time.monotonic()

    def is_settled() -> bool:
        nonlocal seen, since
        if counted.counts != seen:
            seen, since = counted.counts.copy(), time.monotonic()
        return time.monotonic() - since > SETTLE_SECONDS

    _wait_until(is_settled, seconds_max=SETTLE_SECONDS_MAX)


def _wait_until(is_so: Callable[[], bool], *, seconds_max: float) -> None:
    deadline = time.monotonic() + seconds_max
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds_max} s")
        time.sleep(0.05)


def judged(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Returns each contestant's medians, and its ratio to the local store."""
    local = [one["per_s"] for one in found[LOCAL]]
    return {
        name: {
            **{key: spread([one[key] for one in rounds]) for key in rounds[0]},
            "to_local": ratio([one["per_s"] for one in rounds], local),
        }
        for name, rounds in found.items()
    }


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--messages", type=int, default=300_000, help="of each contestant in each round")
    parser.add_argument("--threads", type=int, default=8, help="that publish, each one batch at a time")
    parser.add_argument("--shards", default="1,8,64", help="clusters of so many shards")
    chosen = parser.parse_args()
    names = [LOCAL, FLOOR, *(f"{count} shard{'s' * (count != '1')}" for count in chosen.shards.split(","))]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with servers(chosen.folder) as running, running.ledgers() as ledgers:
        zookeeper = KazooClient(running.bookkeeper.zookeeper_hosts, timeout=SESSION_MS / 1000)
        zookeeper.start(timeout=60)
        try:
            contest = Contest(running, ledgers, zookeeper, messages=chosen.messages, threads=chosen.threads)
            contest.warm_up()
            for number in range(chosen.rounds):
                for name in rotated(names, number):
                    found[name].append(contest.run(name))
                    talk.print(f"{name}: {found[name][-1]['per_s']:,.0f}/s")
        finally:
            zookeeper.stop()
            zookeeper.close()
    results = judged(found)
    table(
        "scheduled publishes, and what a million costs: entries of logs; ledgers and entries of buckets; MB of all",
        (
            "store",
            "per s",
            "to local",
            "client µs",
            "servers µs",
            "log entries",
            "ledgers",
            "entries",
            "MB",
            "znodes",
            "writes",
        ),
        [_row(name, of) for name, of in results.items()],
    )
    if chosen.json:
        print(json.dumps({"benchmark": "delay.cluster.publish_rates", "options": vars(chosen), "machine": machine(),
                          **results}, indent=2, default=str))  # fmt: skip


def _row(name: str, of: Mapping[str, Any]) -> tuple[object, ...]:
    def median(key: str) -> float | None:
        return of[key]["median"] if key in of else None

    sizes = [median(f"{kind}_bytes") for kind in ("log", "manifest", "buckets")]
    megabytes = None if None in sizes else round(sum(one or 0 for one in sizes) / MILLION)
    return (name, round(of["per_s"]["median"]), of["to_local"], median("client_cpu_us"), median("servers_cpu_us"),
            median("log_entries"), median("buckets_ledgers"), median("buckets_entries"), megabytes, median("znodes"),
            median("zookeeper_writes"))  # fmt: skip


if __name__ == "__main__":
    main()
