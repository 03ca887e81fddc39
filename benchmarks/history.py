"""Measures the cost of a long history: an archive of ten million rows, then a transaction left open for minutes.

    python -m benchmarks.history [--archive-rows 10000000] [--open-seconds 600] [--drain-rows 20000] [--rounds 5]

Three phases on one server: `fresh`; `archive`, with so many rows in it; `open`, where on top of that somebody has kept
a transaction open for so long, while producers went on publishing (InnoDB can purge nothing that they deleted: see
`history_list`; claims begin where a look found the first due row, as the compensator's do). In each phase what
publish_cost, claim and drain measure, in short; `to_fresh` compares phases, by each figure's own floor where there is
one, since the machine may have become slower meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from sqlalchemy import Engine, text

from benchmarks import claim, drain, publish_cost
from benchmarks.harness import backlog, report, rounds, servers
from outbox.delivery.relay import RelayPolicy
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core import connect

WORKERS: Final = (1, 8)
CHURN_TRANSACTIONS: Final = 500
DUE_FOR_US: Final = 1_000_000
"""Rows are due so recently that most index entries of deleted rows precede them in a claim's index scan."""
_HISTORY: Final = text("SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--archive-rows", type=int, default=10_000_000)
    parser.add_argument("--open-seconds", type=float, default=120, help="600 for the full test")
    parser.add_argument("--drain-rows", type=int, default=20_000)
    parser.add_argument("--transactions", type=int, default=400, help="of a round of publish_cost")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.archive_rows, chosen.open_seconds = 1, 1_000, 1.0
        chosen.drain_rows, chosen.transactions = 400, 16
    with (
        servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database,
        servers.broker() as broker,
    ):
        server = database.settings()
        publish_cost.prepare(database)
        phases = _phases(database, broker.url, chosen)
    results = {"phases": phases, "to_fresh": _compare(phases)}
    report.table("history, compared to fresh", ("", "archive", "open"), _rows(results["to_fresh"]))
    report.emit("history", chosen=chosen, server=server, results=results)


def _phases(database: servers.Database, broker_url: str, chosen: argparse.Namespace) -> dict[str, Any]:
    engine = background_engine(open_engine(database.url))
    broker = connect(broker_url)
    bench = drain.Bench(engine=engine, schema=database.schema, broker=broker, batch=200, firsts=itertools.count())
    with contextlib.ExitStack() as stack:
        stack.callback(engine.dispose)
        stack.callback(broker.close)
        producers: dict[str, publish_cost.Process] = {}
        for module in publish_cost.OURS:
            process = publish_cost.Process(sys.executable, module, database)
            stack.callback(process.close)
            producers.update(dict.fromkeys(process.cases, process))

        def measured() -> dict[str, Any]:
            return _measure(producers, bench, chosen)

        phases = {"fresh": measured()}
        report.talk.print(f"filling the archive with {chosen.archive_rows:,} rows")
        backlog.fill_archive(engine, database.schema, rows=chosen.archive_rows)
        phases["archive"] = measured()
        with _open_transaction(engine, database.schema):
            report.talk.print(f"a transaction is open for {chosen.open_seconds:,.0f} s, while producers publish")
            _churn(producers["ours"], seconds=chosen.open_seconds)
            phases["open"] = measured()
    return phases


def _measure(
    producers: dict[str, publish_cost.Process], bench: drain.Bench, chosen: argparse.Namespace
) -> dict[str, Any]:
    figures: dict[str, Any] = {"history_list": _history(bench.engine)}
    for workers in WORKERS:
        figures[f"publish_{workers}"] = _publish(producers, chosen, workers=workers)
    store = MessageStore(dialect=bench.engine.dialect, schema=bench.schema)
    cases: dict[str, Callable[[], int]] = {
        "floor": lambda: drain.drain_floor(bench),
        "ours": lambda: drain.drain_ours(bench, bench.broker, RelayPolicy()),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(chosen.rounds):
        for name in rounds.rotated(list(cases), number):
            rows = chosen.drain_rows
            backlog.fill(bench.engine, bench.schema, rows=rows, first=next(bench.firsts) * rows, due_for_us=DUE_FOR_US)
            if number == 0 and name == "ours":
                figures["claim"] = claim.claims(bench.engine, store, count=max(3, chosen.rounds))
            rates[name].append(drain.rate(cases[name], rows))
    figures["drain"] = {
        **{name: rounds.spread(found) for name, found in rates.items()},
        "to_floor": rounds.ratio(rates["ours"], rates["floor"]),
    }
    return figures


def _publish(producers: dict[str, publish_cost.Process], chosen: argparse.Namespace, *, workers: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"hand_written": [], "ours": []}
    for number in range(-1, chosen.rounds):
        for name in rounds.rotated(list(found), number):
            done = producers[name].run(name, workers=workers, count=chosen.transactions)
            if number >= 0:  # the first one warms up
                found[name].append(done.per_second)
    return {
        **{name: rounds.spread(rates) for name, rates in found.items()},
        "to_hand_written": rounds.ratio(found["ours"], found["hand_written"]),
    }


def _churn(producer: publish_cost.Process, *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        producer.run("ours", workers=max(WORKERS), count=CHURN_TRANSACTIONS)


@contextlib.contextmanager
def _open_transaction(engine: Engine, schema: str) -> Iterator[None]:
    """Keep a business transaction open that has read, including our table, and has written. One that has only read,
    like a backup, costs others far less.
    """
    connection = engine.raw_connection()
    cursor = connection.cursor()
    try:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        cursor.execute(f"SELECT COUNT(*) FROM {schema}.message")
        cursor.execute("INSERT INTO bench_entry (account) VALUES (0)")
        yield
    finally:
        connection.rollback()
        connection.invalidate()


def _history(engine: Engine) -> int | None:
    with engine.connect() as connection:
        found = connection.execute(_HISTORY).scalar()
        return None if found is None else int(found)


def _compare(phases: dict[str, Any]) -> dict[str, dict[str, float]]:
    fresh = phases["fresh"]
    return {name: _to_fresh(figures, fresh) for name, figures in phases.items() if name != "fresh"}


def _to_fresh(figures: dict[str, Any], fresh: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for workers in WORKERS:
        now, then = figures[f"publish_{workers}"], fresh[f"publish_{workers}"]
        found[f"publish at {workers}, transactions a second"] = now["ours"]["median"] / then["ours"]["median"]
        found[f"publish at {workers}, to hand-written"] = now["to_hand_written"] / then["to_hand_written"]
    found["drain, rows a second"] = figures["drain"]["ours"]["median"] / fresh["drain"]["ours"]["median"]
    found["drain, to its floor"] = figures["drain"]["to_floor"] / fresh["drain"]["to_floor"]
    for part in ("ms", "read_ms", "take_ms"):
        found[f"claim, {part}"] = figures["claim"][part] / fresh["claim"][part]
    found["claim, locks a row"] = figures["claim"]["locks_a_row"] / fresh["claim"]["locks_a_row"]
    return {name: round(value, 3) for name, value in found.items()}


def _rows(compared: dict[str, dict[str, float]]) -> list[tuple[object, ...]]:
    names = next(iter(compared.values()))
    return [(name, *(of[name] for of in compared.values())) for name in names]


if __name__ == "__main__":
    main()
