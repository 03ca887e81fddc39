"""Measures the drain of a backlog: by the compensator to a real broker, and by a floor that only claims and deletes.

    python -m benchmarks.drain [--sizes 10000,200000,1000000] [--rounds 5] [--batch 200] [--no-peers]

500-byte bodies; one compensator's Scan in this process, the broker a process of its own (durable before each answer,
over HTTP), batches of the same size for all. `ours` is as the compensator runs by default: it keeps the archive.
`ours_without_archive` and `ours_null_broker` (accepts at once) show what these two cost, at the smallest size alone.
Rows a second, and microseconds of processor time a row (this process, the database, the broker); `to_floor` compares
within a round. pactix (batches of 100, its default) and outbox-sqs (batches as ours) drain a few thousand rows
to publishers that accept at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Engine

from benchmarks.contestants.ours import AcceptingBroker
from benchmarks.harness import backlog, report, rounds, servers
from benchmarks.peers import peers_python
from outbox.delivery.relay import RelayPolicy
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core import Broker, connect
from tests.fixtures.table_scan import Scan

PEER_ROWS: Final = (1_000, 2_000)
PEERS: Final = ("pactix", "outbox_sqs")
_NOW_US: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The environment of a drain."""

    engine: Engine
    schema: str
    broker: Broker
    batch: int
    firsts: Iterator[int]
    """The first id of each drain: the broker would drop ids that it knows, which is less work."""
    cpu_seconds: Callable[[], Mapping[str, float]] = dict
    """Processor time used so far, by process."""


@dataclass(frozen=True, slots=True)
class Drained:
    """One drain: rows a second, and the processor time of each row, by process."""

    per_second: float
    cpu_us: Mapping[str, float]


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--sizes", default="10000,200000,1000000", help="backlogs, in rows")
    parser.add_argument("--batch", type=int, default=200, help="rows of a batch")
    parser.add_argument("--no-peers", action="store_true", help="the floor and ours alone")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.sizes = 1, "400,800"
    with (
        servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database,
        servers.broker() as broker,
    ):
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        results = measure(database, broker, chosen)
        peers = {} if chosen.no_peers else _peers(database, rows=(200,) if chosen.quick else PEER_ROWS)
    results |= {"peers_rows_per_second": peers}
    _show(results)
    report.emit("drain", chosen=chosen, server=server, results=results)


def measure(database: servers.Database, process: servers.BrokerProcess, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure the drains of all sizes, and their ratios."""
    engine = background_engine(open_engine(database.url))
    broker = connect(process.url)
    bench = Bench(
        engine=engine,
        schema=database.schema,
        broker=broker,
        batch=chosen.batch,
        firsts=itertools.count(),
        cpu_seconds=partial(_cpu_seconds, database, process),
    )
    sizes = [int(size) for size in chosen.sizes.split(",")]
    cases = drain_cases(bench)
    found = {
        size: _rounds(bench, cases if size == min(sizes) else _two(cases), size=size, count=chosen.rounds)
        for size in sizes
    }
    broker.close()
    engine.dispose()
    smallest, largest = found[min(sizes)], found[max(sizes)]
    return {
        "sizes": {str(size): _figures(rates) for size, rates in found.items()},
        "largest_to_smallest": {name: _to(largest[name], smallest[name]) for name in largest},
    }


def _cpu_seconds(database: servers.Database, process: servers.BrokerProcess) -> dict[str, float]:
    """Returns the processor time used so far, by process, if it is known."""
    broker, server = servers.cpu_seconds_of(process.pid), database.cpu_seconds()
    used = {"compensator": time.process_time(), "database": server, "broker": broker}
    return {name: seconds for name, seconds in used.items() if seconds is not None}


def drain_cases(bench: Bench) -> dict[str, Callable[[], int]]:
    """Returns functions that drain the backlog; each returns the number of rows."""
    return {
        "floor": partial(drain_floor, bench),
        "ours": partial(drain_ours, bench, bench.broker, RelayPolicy()),
        "ours_without_archive": partial(drain_ours, bench, bench.broker, RelayPolicy(keep_archive=False)),
        "ours_null_broker": partial(drain_ours, bench, AcceptingBroker(), RelayPolicy()),  # type: ignore[arg-type]
    }


def _two(cases: Mapping[str, Callable[[], int]]) -> dict[str, Callable[[], int]]:
    return {name: cases[name] for name in ("floor", "ours")}


def _rounds(bench: Bench, cases: Mapping[str, Callable[[], int]], *, size: int, count: int) -> dict[str, list[Drained]]:
    found: dict[str, list[Drained]] = {name: [] for name in cases}
    with report.progress() as bar:
        task = bar.add_task(f"{size:,} rows", total=count * len(cases))
        for number in range(count):
            for name in rounds.rotated(list(cases), number):
                backlog.fill(bench.engine, bench.schema, rows=size, first=next(bench.firsts) * size)
                before = bench.cpu_seconds()
                per_second = rate(cases[name], size)
                used = {who: (now - before[who]) / size * 1e6 for who, now in bench.cpu_seconds().items()}
                found[name].append(Drained(per_second, used))
                backlog.empty(bench.engine, f"{bench.schema}.message", f"{bench.schema}.archive")
                bar.advance(task)
    return found


def rate(drain: Callable[[], int], rows: int) -> float:
    """Returns rows a second; all rows must be drained."""
    started = time.perf_counter()
    done = drain()
    seconds = time.perf_counter() - started
    if done != rows:
        raise RuntimeError(f"{done} of {rows} rows were drained")
    return rows / seconds


def drain_ours(bench: Bench, broker: Broker, policy: RelayPolicy) -> int:
    """One compensator's pass."""
    store = MessageStore(dialect=bench.engine.dialect, schema=bench.schema)
    scan = Scan(engine=bench.engine, store=store, broker=broker, policy=policy, batch_rows=bench.batch)
    return scan.run().accepted


def drain_floor(bench: Bench) -> int:
    """Drain by the necessary statements only, directly through the driver."""
    table, done = f"{bench.schema}.message", 0
    due = f"state = 'pending' AND due_at_us <= {_NOW_US}"
    connection = bench.engine.raw_connection()
    cursor = connection.cursor()
    while True:
        cursor.execute(f"SELECT id FROM {table} WHERE {due} ORDER BY state, due_at_us, id LIMIT {bench.batch}")
        ids = ",".join(sorted(f"'{row[0]}'" for row in cursor.fetchall()))
        connection.commit()
        if not ids:
            connection.close()
            return done
        lease = f"token = 'floor', due_at_us = {_NOW_US} + 60000000, attempts = attempts + 1"
        cursor.execute(f"UPDATE {table} SET {lease} WHERE id IN ({ids}) AND {due}")
        connection.commit()
        done += cursor.execute(f"DELETE FROM {table} WHERE id IN ({ids}) AND token = 'floor'")
        connection.commit()


def _peers(database: servers.Database, *, rows: tuple[int, ...]) -> dict[str, Any]:
    try:
        python = peers_python()
    except RuntimeError as error:
        return {"missing": str(error)}
    return {name: {str(size): _peer(python, name, database, rows=size) for size in rows} for name in PEERS}


def _peer(python: str, name: str, database: servers.Database, *, rows: int) -> Any:
    command = [python, "-m", f"benchmarks.contestants.{name}_relay", "drain", "--rows", str(rows)]
    command += ["--url", database.url, "--async-url", database.async_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=servers.environment())
    if done.returncode != 0:
        return {"failed": done.stderr.strip()[-500:]}
    return round(rows / json.loads(done.stdout)["seconds"])


def _figures(found: Mapping[str, list[Drained]]) -> dict[str, Any]:
    rates = {name: [one.per_second for one in of] for name, of in found.items()}
    return {
        "rows_per_second": {name: rounds.spread(of) for name, of in rates.items()},
        "to_floor": rounds.ratios(rates, to="floor"),
        "cpu_us_a_row": {name: _cpu(of) for name, of in found.items()},
    }


def _cpu(found: Sequence[Drained]) -> dict[str, float]:
    return {who: round(statistics.median(one.cpu_us[who] for one in found), 1) for who in found[0].cpu_us}


def _to(found: Sequence[Drained], other: Sequence[Drained]) -> float:
    medians = [statistics.median(one.per_second for one in of) for of in (found, other)]
    return round(medians[0] / medians[1], 3)


def _show(results: dict[str, Any]) -> None:
    for size, figures in results["sizes"].items():
        rows = [
            (
                name,
                spread["median"],
                spread["min"],
                spread["max"],
                figures["to_floor"].get(name),
                " / ".join(f"{one:.0f}" for one in figures["cpu_us_a_row"][name].values()),
            )
            for name, spread in figures["rows_per_second"].items()
        ]
        title = f"drain of {int(size):,} rows, rows a second"
        report.table(title, ("", "median", "min", "max", "to floor", "CPU us"), rows)
    report.table("largest to smallest", ("", "ratio"), list(results["largest_to_smallest"].items()))
    peers = [(f"{name}, {rows} rows", rate) for name, of in results["peers_rows_per_second"].items()
             if isinstance(of, dict) for rows, rate in of.items()]  # fmt: skip
    report.table("peers, rows a second", ("", ""), peers)


if __name__ == "__main__":
    main()
