"""Measures the drain of a backlog of ordered keys after a broker's outage, compared with the same rows unordered.

    python -m benchmarks.drain_after_outage [--keys 1,2,1000] [--rows 2000] [--outage-seconds 6] [--rounds 5]

Rows are published by the SDK and left to a compensator, which finds the broker out for a while and then drains to it;
the broker accepts at once. Rows a second from its return to the last row, waiting for due times included; claims a row
from its return on; `to_unordered` compares within a round. Rows of no ordered topic have 1,000 keys.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Engine

from benchmarks.contestants.ours import AcceptingBroker
from benchmarks.harness import backlog, report, rounds, servers
from compensator.core.batch_totals import BatchTotals, add
from outbox import Outbox, SenderLimits
from outbox.delivery.relay import RelayPolicy
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core import Message, PublishResult
from outbox_core.common.errors import BrokerUnavailable
from tests.fixtures.table_scan import Scan

UNORDERED: Final = "unordered"
TOPIC: Final = "bench-ordered"
KEYS_UNORDERED: Final = 1_000
MESSAGES_A_TRANSACTION: Final = 20
BATCH_ROWS: Final = 200
LEASE_MS: Final = 1_000
PAUSE_SECONDS: Final = 0.05
DRAIN_SECONDS_MAX: Final = 300.0


class Outage(AcceptingBroker):
    """A broker that is out while `is_out`."""

    is_out = True

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Stored. Raises BrokerUnavailable while it is out."""
        if self.is_out:
            raise BrokerUnavailable("the broker is out")
        return super().publish(batch)


@dataclass(frozen=True, slots=True)
class Drained:
    """One drain: rows a second, and how often each row was claimed."""

    per_second: float
    claims_a_row: float


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__, rounds=5)
    parser.add_argument("--keys", default="1,2,1000", help="how many ordered keys the rows have")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--outage-seconds", type=float, default=6.0)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.rows, chosen.outage_seconds = 1, 100, 0.5
    with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        results = measure(database, chosen)
    _show(results)
    report.emit("drain_after_outage", chosen=chosen, server=server, results=results)


def measure(database: servers.Database, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of keys in rotated rounds."""
    engine = background_engine(open_engine(database.url))
    cases = [UNORDERED, *chosen.keys.split(",")]
    found: dict[str, list[Drained]] = {name: [] for name in cases}
    with report.progress() as bar:
        task = bar.add_task("rounds", total=chosen.rounds * len(cases))
        for number in range(chosen.rounds):
            for name in rounds.rotated(cases, number):
                found[name].append(
                    drained(engine, database.schema, name, rows=chosen.rows, outage_seconds=chosen.outage_seconds)
                )
                bar.advance(task)
    engine.dispose()
    rates = {name: [one.per_second for one in some] for name, some in found.items()}
    return {
        "rows_per_second": {name: rounds.spread(some) for name, some in rates.items()},
        "claims_a_row": {name: statistics.median(one.claims_a_row for one in some) for name, some in found.items()},
        "to_unordered": {name: rounds.ratio(some, rates[UNORDERED]) for name, some in rates.items()},
    }


def drained(engine: Engine, schema: str, case: str, *, rows: int, outage_seconds: float) -> Drained:
    """Publish during an outage, end it, drain. Raises RuntimeError if rows are left."""
    broker = Outage()
    _publish(engine, schema, broker, case, rows=rows)
    store = MessageStore(dialect=engine.dialect, schema=schema)
    scan = Scan(
        engine=engine, store=store, broker=broker, policy=RelayPolicy(),  # type: ignore[arg-type]
        batch_rows=BATCH_ROWS,
    )  # fmt: skip
    ends = time.monotonic() + outage_seconds
    while time.monotonic() < ends:
        scan.run()
        time.sleep(PAUSE_SECONDS)
    broker.is_out = False
    total, started = BatchTotals(), time.perf_counter()
    while total.accepted < rows and time.perf_counter() - started < DRAIN_SECONDS_MAX:
        done = scan.run()
        total = add(total, done)
        if not done.claimed:
            time.sleep(PAUSE_SECONDS)
    seconds = time.perf_counter() - started
    backlog.empty(engine, f"{schema}.message", f"{schema}.archive", f"{schema}.order_head", f"{schema}.order_queue")
    if total.accepted != rows:
        raise RuntimeError(f"{total.accepted} of {rows} rows were drained")
    return Drained(rows / seconds, total.claimed / rows)


def _publish(engine: Engine, schema: str, broker: Outage, case: str, *, rows: int) -> None:
    """Insert rows like a producer whose messages were not sent: leased for LEASE_MS."""
    keys = KEYS_UNORDERED if case == UNORDERED else int(case)
    ordered = set() if case == UNORDERED else {TOPIC}
    box = Outbox(
        engine, broker=broker, schema=schema, ordered=ordered,  # type: ignore[arg-type]
        sender=SenderLimits(queue_rows_max=0, lease_ms=LEASE_MS, lease_margin_ms=LEASE_MS // 2),
    )  # fmt: skip

    @box.transactional
    def work(_session: object, numbers: range) -> None:
        for number in numbers:
            box.publish(TOPIC, {"n": number}, key=f"key-{number % keys}")

    for start in range(0, rows, MESSAGES_A_TRANSACTION):
        work(numbers=range(start, min(rows, start + MESSAGES_A_TRANSACTION)))
    box.close()
    time.sleep(LEASE_MS / 1_000)


def _show(results: dict[str, Any]) -> None:
    lines = [
        (name, *spread.values(), results["claims_a_row"][name], results["to_unordered"][name])
        for name, spread in results["rows_per_second"].items()
    ]
    columns = next(iter(results["rows_per_second"].values()))
    report.table("drain_after_outage, rows a second", ("keys", *columns, "claims a row", "to unordered"), lines)


if __name__ == "__main__":
    main()
