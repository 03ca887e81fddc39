"""Measures the cost of publishing in a business transaction: none, a hand-written INSERT, this SDK, the peers.

    python -m benchmarks.publish_cost [--server mysql] [--rounds 15] [--transactions 300] [--no-peers]

One SELECT, one UPDATE, one INSERT; then nothing, or a message. At 1 and 8 threads (asyncio: tasks). Each contestant is
a process of its own; they run one after the other, in an order that rotates from round to round. Ours includes sending
(to a broker that accepts at once) and removing the rows, in the producer's process and beside it; so does modupy.
pactix and outbox-sqs write only: their relays are other processes, which do not run here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import create_engine

from benchmarks.contestants.business import make_tables
from benchmarks.harness import report, rounds, servers
from benchmarks.peers import PEERS, peers_python
from outbox.migrate.schema_upgrade import upgrade

OURS = ("floors", "ours")
PEER_MODULES = ("outbox_sqs_peer", "pactix_peer", "modupy_peer")
WORKERS = (1, 8)
FLOOR_OF = {"ours_async": "hand_written_async", "pactix": "hand_written_async", "modupy": "hand_written_async"}
"""The contestants whose floor is the asyncio one."""


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__, rounds=15)
    parser.add_argument("--transactions", type=int, default=300, help="a round")
    parser.add_argument("--no-peers", action="store_true", help="the floors and ours alone")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.transactions = 1, 16
    with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
        server = database.settings()
        found, missing = _measure(database, chosen)
    results = {"peers": {**PEERS, "missing": missing}, "workers": {str(n): _figures(of) for n, of in found.items()}}
    _show(results["workers"], chosen)
    report.emit("publish_cost", chosen=chosen, server=server, results=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transactions a second, and the processor time of each: the contestant's, and the server's where it is ours."""

    per_second: float
    client_cpu_us: float
    server_cpu_us: float | None = None


class Process:
    """A contestant's process: runs a case by command, and returns its duration."""

    def __init__(self, python: str, module: str, database: servers.Database) -> None:
        command = [python, "-m", "benchmarks.contestants.process", module, "--url", database.url]
        command += ["--async-url", database.async_url, "--schema", database.schema]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=servers.environment()
        )
        self.cases: list[str] = self._answer()["cases"]

    def run(self, case: str, *, workers: int, count: int) -> Round:
        """A round of `count` transactions."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"case": case, "workers": workers, "count": count}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        done = count // workers * workers
        return Round(per_second=done / answer["seconds"], client_cpu_us=answer["cpu_seconds"] / done * 1e6)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
            print(line, end="", file=sys.stderr)
        raise RuntimeError("a contestant's process ended; see its error above")


def prepare(database: servers.Database) -> None:
    """The business's tables and the outbox's."""
    engine = create_engine(database.url)
    with engine.begin() as connection:
        make_tables(connection)
    engine.dispose()
    upgrade(database.url, schema=database.schema)


def _measure(
    database: servers.Database, chosen: argparse.Namespace
) -> tuple[dict[int, dict[str, list[Round]]], dict[str, str]]:
    prepare(database)
    with contextlib.ExitStack() as stack:
        processes, missing = _start(stack, database, peers=not chosen.no_peers)
        found = {workers: _rounds(processes, database, chosen, workers=workers) for workers in WORKERS}
    return found, missing


def _start(
    stack: contextlib.ExitStack, database: servers.Database, *, peers: bool
) -> tuple[dict[str, Process], dict[str, str]]:
    """Returns each case's process, and the contestants that are not available, with the reason."""
    processes: dict[str, Process] = {}
    missing: dict[str, str] = {}
    for python, module in _modules(missing, peers=peers):
        try:
            process = Process(python, module, database)
        except RuntimeError as error:
            missing[module] = str(error)
            continue
        stack.callback(process.close)
        processes.update(dict.fromkeys(process.cases, process))
    return processes, missing


def _modules(missing: dict[str, str], *, peers: bool) -> Iterator[tuple[str, str]]:
    for module in OURS:
        yield sys.executable, module
    if peers:
        try:
            python = peers_python()
        except RuntimeError as error:
            missing["all"] = str(error)
            return
        for module in PEER_MODULES:
            yield python, module


def _rounds(
    processes: Mapping[str, Process], database: servers.Database, chosen: argparse.Namespace, *, workers: int
) -> dict[str, list[Round]]:
    """Run the rounds of each case, after a short warm-up round."""
    cases = list(processes)
    found: dict[str, list[Round]] = {case: [] for case in cases}
    with report.progress() as bar:
        task = bar.add_task(f"{workers} workers", total=len(cases) * (chosen.rounds + 1))
        for number in range(-1, chosen.rounds):
            for case in rounds.rotated(cases, number):
                count = max(workers, chosen.transactions if number >= 0 else chosen.transactions // 2)
                before = database.cpu_seconds()
                done = processes[case].run(case, workers=workers, count=count)
                after = database.cpu_seconds()
                if before is not None and after is not None:
                    done = replace(done, server_cpu_us=(after - before) / count * 1e6)
                if number >= 0:
                    found[case].append(done)
                bar.advance(task)
    return found


def _figures(found: Mapping[str, list[Round]]) -> dict[str, Any]:
    rates = {case: [one.per_second for one in of] for case, of in found.items()}
    figures: dict[str, Any] = {
        "transactions_per_second": {case: rounds.spread(of) for case, of in rates.items()},
        "to_hand_written": {
            case: rounds.ratio(of, rates[FLOOR_OF.get(case, "hand_written")]) for case, of in rates.items()
        },
        "cpu_us_a_transaction": {case: _cpu(of) for case, of in found.items()},
        "ten_messages_to_one": rounds.ratio(rates["ours"], rates["ours_ten"]),
    }
    for peer in ("pactix", "modupy", "outbox_sqs"):
        if peer in rates:
            figures[f"ours_to_{peer}"] = rounds.ratio(rates["ours"], rates[peer])
            figures[f"ours_async_to_{peer}"] = rounds.ratio(rates["ours_async"], rates[peer])
    return figures


def _cpu(found: list[Round]) -> dict[str, float | None]:
    servers_of = [one.server_cpu_us for one in found if one.server_cpu_us is not None]
    return {
        "client": round(statistics.median(one.client_cpu_us for one in found)),
        "server": round(statistics.median(servers_of)) if servers_of else None,
    }


def _show(by_workers: Mapping[str, Any], chosen: argparse.Namespace) -> None:
    for workers, figures in by_workers.items():
        rows = [
            (
                case,
                spread["median"],
                spread["min"],
                spread["max"],
                figures["to_hand_written"][case],
                *figures["cpu_us_a_transaction"][case].values(),
            )
            for case, spread in figures["transactions_per_second"].items()
        ]
        title = f"publish_cost, {workers} threads or tasks, {chosen.rounds} rounds, transactions a second"
        report.table(title, ("", "median", "min", "max", "to hand-written", "CPU us", "server"), rows)
        others = [(name, value) for name, value in figures.items() if isinstance(value, float)]
        report.table("ratios", ("", "median of rounds"), others)


if __name__ == "__main__":
    main()
