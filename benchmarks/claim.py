"""Measures a claim at backlogs of a thousand to a million rows, next to a million parked rows; and an idle source.

    python -m benchmarks.claim [--sizes 1000,10000,100000,1000000] [--parked 1000000] [--rounds 15] [--idle-seconds 60]

A claim is what the compensator does before it sends, here of 100 rows: read those that are due, take them, commit.
`ms` is the median of the whole; read_ms, take_ms and commit_ms (the log's fsyncs) are its parts. `locks_a_row`: row
locks that its transaction holds before it commits; `statements`: what the server counted, with begins and ends. Claimed
rows are given back, so that the backlog stays. pactix (100 rows, its default) and outbox-sqs (100 rows) claim from
tables of their own with as many rows and no parked ones. `idle` is `outbox compensator run` on an empty table: the
queries a second that the server counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from benchmarks.harness import backlog, report, servers
from benchmarks.peers import peers_python
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core.messages.ids import new_token

BATCH: Final = 100
WARM_UP: Final = 2
LEASE_US: Final = 60_000_000
PEERS: Final = ("pactix", "outbox_sqs")
_LOCKS: Final = text("SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = :id")
_CACHE_SECONDS: Final = 0.2
"""innodb_trx is refreshed every 0.1 s at most."""
_OF_ASKING: Final = 2
"""Statements of the measurement itself: the query, and the end of its transaction."""
_IDLE_WARM_UP_SECONDS: Final = 5.0


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__, rounds=15)
    parser.add_argument("--sizes", default="1000,10000,100000,1000000", help="backlogs, in rows")
    parser.add_argument("--parked", type=int, default=1_000_000, help="parked rows beside them")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long an idle compensator is watched")
    parser.add_argument("--peer-sizes", default="1000,10000,100000", help="theirs; a claim may take minutes beyond")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.sizes, chosen.parked, chosen.idle_seconds = 3, "300,600", 500, 3.0
        chosen.peer_sizes = "300"
    with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        results: dict[str, Any] = {"idle": idle(database, seconds=chosen.idle_seconds)}
        results |= {"batch": BATCH, "ours": measure(database, chosen)}
        results["peers"] = {} if chosen.no_peers else _peers(database, chosen)
    _show(results)
    report.emit("claim", chosen=chosen, server=server, results=results)


def measure(database: servers.Database, chosen: argparse.Namespace) -> dict[str, Any]:
    """Our claim at each size."""
    engine = background_engine(open_engine(database.url))
    sizes = sorted(int(size) for size in chosen.sizes.split(","))
    store = MessageStore(dialect=engine.dialect, schema=database.schema)
    backlog.fill(engine, database.schema, rows=chosen.parked, state="parked", first=10**9)
    found: dict[str, Any] = {}
    filled = 0
    for size in sizes:
        backlog.fill(engine, database.schema, rows=size - filled, first=filled)
        filled = size
        _analyze(engine, database.schema)
        found[str(size)] = claims(engine, store, count=chosen.rounds)
    backlog.empty(engine, f"{database.schema}.message")
    engine.dispose()
    return found


def idle(database: servers.Database, *, seconds: float) -> dict[str, float]:
    """Queries a second of a compensator that finds nothing, less those of asking; the server has no other client."""
    with servers.broker() as broker:
        command = ["compensator", "run", "--url", database.url, "--schema", database.schema, "--broker", broker.url]
        with servers.outbox_process(command) as process, contextlib.closing(database.server.connect()) as watching:
            _pause(min(_IDLE_WARM_UP_SECONDS, seconds))
            before, started = _questions(watching), time.perf_counter()
            _pause(seconds)
            counted, took = _questions(watching) - before - 1, time.perf_counter() - started
            if process.poll() is not None:
                raise RuntimeError("the compensator ended")
    return {"queries_per_second": round(counted / took, 3), "seconds": round(took, 1)}


def claims(engine: Engine, store: MessageStore, *, count: int) -> dict[str, Any]:
    """What claims cost, of which there must be enough due rows; these are given back."""
    times: dict[str, list[float]] = {}
    locks, statements, rows = [], [], []
    with engine.connect() as connection, engine.connect() as watcher, report.progress() as bar:
        from_us = _first_due_us(connection, store)
        for number in bar.track(range(-WARM_UP, count), description="claims"):
            asked = _session_questions(connection)
            ids, took = _claim(connection, store, from_us=from_us)
            counted = _session_questions(connection) - asked
            if number >= 0:
                for name, ms in took.items():
                    times.setdefault(name, []).append(ms)
                locks.append(_locked(connection, watcher, store, ids))
                statements.append(counted - _OF_ASKING)
                rows.append(len(ids))
            _give_back(connection, store, ids)
    return {
        **{name: round(statistics.median(found), 3) for name, found in times.items()},
        "locks_a_row": round(statistics.median(locks) / BATCH, 3),
        "statements": statistics.median(statements),
        "rows": statistics.median(rows),
    }


def _first_due_us(connection: Connection, store: MessageStore) -> int:
    """Returns the due time that the compensator's poll returns: a turn's batches begin there."""
    table = f"{store.table.schema}.{store.table.name}"
    with connection.begin():
        return int(connection.execute(text(f"SELECT MIN(due_at_us) FROM {table} WHERE state = 'pending'")).scalar_one())


def _claim(connection: Connection, store: MessageStore, *, from_us: int) -> tuple[list[str], dict[str, float]]:
    """Claim like the compensator; returns the ids, and the milliseconds of the parts."""
    token, clock = new_token(), [time.perf_counter()]
    with connection.begin():
        ids = [row.id for row in store.due_rows(connection, limit=BATCH, from_us=from_us).rows]
    clock.append(time.perf_counter())
    with connection.begin() as transaction:
        taken = store.claim(connection, ids, token=token, lease_us=LEASE_US)
        clock.append(time.perf_counter())
        transaction.commit()
    clock.append(time.perf_counter())
    if taken != len(ids):
        raise RuntimeError("somebody else claims from this table")
    parts = [(after - before) * 1000 for before, after in itertools.pairwise(clock)]
    return ids, {"ms": sum(parts), **dict(zip(("read_ms", "take_ms", "commit_ms"), parts, strict=True))}


def _locked(connection: Connection, watcher: Connection, store: MessageStore, ids: Sequence[str]) -> int:
    """Returns the row locks of a claim of these rows, which is rolled back; they are made due for it."""
    _give_back(connection, store, ids)
    with connection.begin() as transaction:
        me = connection.execute(text("SELECT CONNECTION_ID()")).scalar_one()
        found = store.due_ids(connection, limit=BATCH)
        store.claim(connection, found, token=new_token(), lease_us=LEASE_US)
        _pause(_CACHE_SECONDS)
        locks = int(watcher.execute(_LOCKS, {"id": me}).scalar_one())
        watcher.rollback()
        transaction.rollback()
    return locks


def _give_back(connection: Connection, store: MessageStore, ids: Sequence[str]) -> None:
    """Make rows due an hour ago, as before."""
    table = f"{store.table.schema}.{store.table.name}"
    given_back = text(
        f"UPDATE {table} SET token = NULL, due_at_us = created_at_us, attempts = 1 WHERE id IN "
        f"({','.join(repr(one) for one in sorted(ids))})"
    )
    with connection.begin():
        connection.execute(given_back)


def _analyze(engine: Engine, schema: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"ANALYZE TABLE {schema}.message")).all()


def _session_questions(connection: Connection) -> int:
    with connection.begin():
        return int(connection.execute(text("SHOW SESSION STATUS LIKE 'Questions'")).one()[1])


def _questions(connection: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        return int(cursor.fetchone()[1])


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def _peers(database: servers.Database, chosen: argparse.Namespace) -> dict[str, Any]:
    try:
        python = peers_python()
    except RuntimeError as error:
        return {"missing": str(error)}
    sizes = [int(size) for size in chosen.peer_sizes.split(",")]
    return {name: {str(size): _peer(python, name, database, rows=size) for size in sizes} for name in PEERS}


def _peer(python: str, name: str, database: servers.Database, *, rows: int) -> dict[str, Any]:
    command = [python, "-m", f"benchmarks.contestants.{name}_relay", "claim", "--rows", str(rows)]
    command += ["--url", database.url, "--async-url", database.async_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=servers.environment())
    if done.returncode != 0:
        return {"failed": done.stderr.strip()[-500:]}
    return {key: round(value, 3) for key, value in json.loads(done.stdout).items()}


def _show(results: dict[str, Any]) -> None:
    rows = [(f"{int(size):,}", *of.values()) for size, of in results["ours"].items()]
    report.table(f"claim of {BATCH} rows", ("due", *next(iter(results["ours"].values()))), rows)
    peers = [
        (f"{name}, {size} due", of.get("ms"), of.get("row_locks"), of.get("rows"), of.get("failed", "")[-60:])
        for name, sizes in results["peers"].items() if isinstance(sizes, dict) for size, of in sizes.items()
    ]  # fmt: skip
    report.table("peers' claims", ("", "ms", "row locks", "rows", ""), peers)
    report.table("idle compensator", ("", "queries a second"), [("", results["idle"]["queries_per_second"])])


if __name__ == "__main__":
    main()
