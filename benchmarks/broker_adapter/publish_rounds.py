"""Compares publishers of one engine in rotated rounds, the adapter and plain programs with its client; drains to it.

The drain is of an outbox's backlog on a MariaDB of its own, in batches of 500, beside the same to a broker that accepts
at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from benchmarks.contestants.ours import AcceptingBroker
from benchmarks.harness import backlog, servers
from benchmarks.harness.report import machine, table
from benchmarks.harness.rounds import ratio, rotated, spread
from outbox.delivery.relay import RelayPolicy
from outbox.migrate.schema_upgrade import upgrade
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox_core import Message
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from tests.fixtures.table_scan import Scan

BODY: Final = b"x" * 512
BATCH: Final = 500
TOPIC: Final = "bench.messages"


class Publisher(Protocol):
    """A program that publishes messages of BODY to TOPIC."""

    @property
    def name(self) -> str:
        """As it stands in the report."""

    def publish(self, count: int) -> None:
        """Publish so many together, and wait until all are confirmed."""

    def close(self) -> None:
        """Close the connection."""


class Adapter:
    """The broker that an Outbox publishes to."""

    name = "adapter"

    def __init__(self, url: str, ids: Iterator[int]) -> None:
        self._broker: Broker = connect(url)
        self._ids = ids

    def publish(self, count: int) -> None:
        """Publish one batch."""
        batch = [Message(id=f"a{next(self._ids)}", topic=TOPIC, body=BODY) for _ in range(count)]
        assert all(one.status.is_success for one in self._broker.publish(batch))

    def close(self) -> None:
        """Close the connection."""
        self._broker.close()


def arguments(description: str | None, *, batches: int, singles: int) -> argparse.ArgumentParser:
    """The options that all have; the numbers are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=batches, help="of 500, a round")
    parser.add_argument("--singles", type=int, default=singles, help="a round")
    parser.add_argument("--drain-rows", type=int, default=5_000, help="of a backlog, a round; 0 for no drain")
    parser.add_argument("--folder", help="where the servers have their files: a disk whose syncs are real")
    parser.add_argument("--json", action="store_true", help="the figures on stdout")
    return parser


def compare(
    url: str, plain: Callable[[Iterator[int]], Sequence[Publisher]], chosen: argparse.Namespace
) -> Mapping[str, Any]:
    """Returns for batches and single messages the messages a second of each publisher, and the adapter's ratio to the
    fastest plain one. `plain` makes those, with the numbers for their messages' ids.
    """
    ids = itertools.count()
    publishers: list[Publisher] = [Adapter(url, ids), *plain(ids)]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in publishers:
        one.publish(BATCH)
    for number in range(chosen.rounds):
        for one in rotated(publishers, number):
            found["batches_of_500"][one.name].append(_rate(one, count=BATCH, times=chosen.batches))
            found["one_at_a_time"][one.name].append(_rate(one, count=1, times=chosen.singles))
    for one in publishers:
        one.close()
    if chosen.drain_rows:
        found["drain"] = _drains(url, chosen)
    return {kind: _judged(of) for kind, of in found.items()}


def _drains(url: str, chosen: argparse.Namespace) -> dict[str, list[float]]:
    """Rows a second, to the adapter and to a broker that accepts at once."""
    brokers = {Adapter.name: connect(url), "accepts_at_once": AcceptingBroker()}
    found: dict[str, list[float]] = defaultdict(list)
    rows, firsts = chosen.drain_rows, itertools.count()
    with servers.database(kind="mariadb", url=None, memory_mb=256) as database:
        upgrade(database.url, schema=database.schema)
        engine = background_engine(open_engine(database.url))
        store = MessageStore(dialect=engine.dialect, schema=database.schema)
        for number in range(chosen.rounds):
            for name in rotated(list(brokers), number):
                backlog.fill(engine, database.schema, rows=rows, first=next(firsts) * rows, topic=TOPIC)
                scan = Scan(
                    engine=engine,
                    store=store,
                    broker=brokers[name],
                    policy=RelayPolicy(),
                    batch_rows=BATCH,  # type: ignore[arg-type]
                )
                begun = time.perf_counter()
                assert scan.run().accepted == rows
                found[name].append(rows / (time.perf_counter() - begun))
                backlog.empty(engine, f"{database.schema}.message", f"{database.schema}.archive")
        engine.dispose()
    brokers[Adapter.name].close()
    return found


def report(engine: str, results: Mapping[str, Any], chosen: argparse.Namespace) -> None:
    """Print a table, and with --json all figures."""
    rows = [
        (kind, of[Adapter.name]["median"], of[of["fastest_plain"]]["median"], of["ratio"])
        for kind, of in results.items()
    ]
    table(f"{engine}, messages a second", ("kind", "adapter", "fastest plain", "ratio"), rows)
    if chosen.json:
        print(json.dumps({"engine": engine, "options": vars(chosen), "machine": machine(), **results}, indent=2))


def _rate(publisher: Publisher, *, count: int, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        publisher.publish(count)
    return count * times / (time.perf_counter() - begun)


def _judged(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    spreads = {name: spread(of) for name, of in rates.items()}
    fastest = max((name for name in rates if name != Adapter.name), key=lambda name: spreads[name]["median"])
    return {**spreads, "fastest_plain": fastest, "ratio": ratio(rates[Adapter.name], rates[fastest])}
