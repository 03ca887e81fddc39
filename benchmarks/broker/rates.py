"""Measures throughput and latency from Python: this broker, Redis Streams, NATS JetStream, RabbitMQ's quorum queues.

    python -m benchmarks.broker.rates [--rounds 5] [--messages 50000] [--quick] [--only outbox_http,redis_streams]

512-byte bodies, durable before each answer, client and server processes on one machine, each peer through its own fast
Python client, where it offers a way that does less as well: published figures are of C or Java clients, and of messages
in memory when they are acknowledged, and do not say what a Python program gets. NATS is slow where each message is
synced; its default, a sync every two minutes, is no contestant. Rounds are interleaved and their order rotates; figures
are medians over the rounds, ratios are medians of the rounds' ratios. Servers run on free ports and temporary folders,
all at once, but only one of them works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.broker import peer_programs, servers
from benchmarks.harness.report import machine, progress, table, talk
from benchmarks.harness.rounds import percentiles, ratio, rotated, spread
from benchmarks.harness.servers import environment

OURS: Final = "outbox_http"
TREE: Final = frozenset({OURS, "outbox_bookkeeper"})
"""Those whose clients need this tree's environment alone."""
RATES: Final = (
    "publish_500", "publish_500_4_in_flight", "consume_500", "publish_1_at_1", "publish_1_at_32",
    "publish_1_in_32_threads",
)  # fmt: skip
LATENCIES: Final = ("p50_ms", "p99_ms")
PER_SECOND: Final = 1_000
SINGLE_WORKERS: Final = (1, 32)
THREADS: Final = 32
STOP_SECONDS_MAX: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a round does."""

    batched: int
    singles: int
    paced: int


@dataclass(slots=True, kw_only=True)
class Running:
    """One contestant: its server, and two client processes, of which the second only receives."""

    name: str
    peer: servers.Peer
    client: Client
    receiver: Client
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_us: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Client:
    """A process of benchmarks.broker.client."""

    def __init__(self, python: str, module: str, address: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.broker.client", module, address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        self.answer()

    def ask(self, what: str, **arguments: Any) -> None:
        """Have it work."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError where it is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a client ended; what it wrote to stderr says why")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Have it work, and wait for its answer."""
        self.ask(what, **arguments)
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Measure, and print."""
    chosen = _arguments()
    sizes = _sizes(chosen)
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running = [one for name in chosen.only if (one := _start(stack, name, failed)) is not None]
        with progress() as bar:
            task = bar.add_task("rounds", total=chosen.rounds * len(running))
            for number in range(chosen.rounds):
                for one in rotated(running, number):
                    _round(one, f"bench-{number}", sizes)
                    bar.advance(task)
    results = {one.name: _figures(one) for one in running}
    ratios = _ratios(running)
    _print(results, ratios, running)
    print(
        json.dumps(
            {
                "benchmark": "broker.rates", "options": vars(chosen), "machine": machine(),
                "clients": peer_programs.CLIENTS,
                "servers": {one.name: one.peer.version for one in running}, "failed": failed,
                "results": results, "ratios": ratios,
            },
            indent=2,
        )
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=50_000, help="of a round, in batches of 500")
    parser.add_argument("--quick", action="store_true", help="small sizes and three rounds")
    parser.add_argument(
        "--only", type=lambda text: [name for name in servers.CONTESTANTS if name in text.split(",")],
        default=[name for name in servers.CONTESTANTS if name not in TREE or name == OURS],
        help=f"of {','.join(servers.CONTESTANTS)}",
    )  # fmt: skip
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.messages = min(chosen.rounds, 3), 10_000
    return chosen


def _sizes(chosen: argparse.Namespace) -> Sizes:
    if chosen.quick:
        return Sizes(batched=chosen.messages, singles=320, paced=1_000)
    return Sizes(batched=chosen.messages, singles=1_600, paced=5_000)


def _start(stack: contextlib.ExitStack, name: str, failed: dict[str, str]) -> Running | None:
    """A contestant that cannot run is left out, and the result says why."""
    try:
        peer = stack.enter_context(servers.CONTESTANTS[name]())
        python = sys.executable if name in TREE else peer_programs.peers_python()
        clients = [Client(python, name, peer.address) for _ in range(2)]
    except RuntimeError as error:
        talk.print(f"{name} is left out: {error}")
        failed[name] = str(error)
        return None
    for one in clients:
        stack.callback(one.close)
    return Running(name=name, peer=peer, client=clients[0], receiver=clients[1])


def _round(one: Running, topic: str, sizes: Sizes) -> None:
    with _topic(one, f"{topic}-batched") as name:
        _rate(one, "publish_500", sizes.batched, "publish", topic=name, in_flight=1)
        _rate(one, "consume_500", sizes.batched, "consume", topic=name)
    with _topic(one, f"{topic}-flight") as name:
        _rate(one, "publish_500_4_in_flight", sizes.batched, "publish", topic=name, in_flight=4)
    with _topic(one, f"{topic}-singles") as name:
        for workers in SINGLE_WORKERS:
            _rate(one, f"publish_1_at_{workers}", sizes.singles, "publish_singles", topic=name, workers=workers)
        _rate(one, "publish_1_in_32_threads", sizes.singles, "publish_in_threads", topic=name, workers=THREADS)
    with _topic(one, f"{topic}-paced") as name:
        _latency(one, name, count=sizes.paced)


@contextlib.contextmanager
def _topic(one: Running, name: str) -> Iterator[str]:
    one.client.do("begin", topic=name)
    yield name
    one.client.do("end", topic=name)


def _rate(one: Running, figure: str, count: int, what: str, **arguments: Any) -> None:
    before = one.peer.cpu_seconds()
    answer = one.client.do(what, count=count, **arguments)
    one.values[figure].append(count / answer["seconds"])
    one.cpu_us[f"{figure}_server"].append((one.peer.cpu_seconds() - before) / count * 1e6)
    one.cpu_us[f"{figure}_client"].append(answer["cpu_seconds"] / count * 1e6)


def _latency(one: Running, topic: str, *, count: int) -> None:
    one.receiver.ask("receive", topic=topic, count=count)
    one.receiver.answer()
    one.client.do("publish_paced", topic=topic, count=count, per_second=PER_SECOND)
    ages = one.receiver.answer()["found"]
    for name, value in percentiles([age * 1_000 for age in ages]).items():
        one.values[name].append(value)


def _figures(one: Running) -> dict[str, Any]:
    return {
        "per_second": {name: spread(one.values[name]) for name in RATES},
        "latency_at_1000_per_second": {name: spread(one.values[name]) for name in LATENCIES},
        "cpu_us_per_message": {name: spread(values)["median"] for name, values in one.cpu_us.items()},
    }


def _ratios(running: list[Running]) -> dict[str, dict[str, float]]:
    """Ours to each peer; above 1 ours is better, in latency as well."""
    ours = next((one for one in running if one.name == OURS), None)
    if ours is None:
        return {}
    return {
        other.name: {
            **{name: ratio(ours.values[name], other.values[name]) for name in RATES},
            **{name: ratio(other.values[name], ours.values[name]) for name in LATENCIES},
        }
        for other in running
        if other is not ours
    }


def _print(results: dict[str, Any], ratios: dict[str, dict[str, float]], running: list[Running]) -> None:
    names = [one.name for one in running]
    others = list(ratios)
    rows = []
    for kind, figures in (("per_second", RATES), ("latency_at_1000_per_second", LATENCIES)):
        for figure in figures:
            medians = [results[name][kind][figure]["median"] for name in names]
            worst = min((ratios[other][figure] for other in others), default=None)
            rows.append([figure, *medians, worst])
    table("messages a second; milliseconds", ["figure", *names, "ours to the best"], rows)


if __name__ == "__main__":
    main()
