"""Measures the latency from commit to the first line of a consumer's handler, with the outbox and without (floor).

    python -m benchmarks.commit_to_handler [--messages 300] [--rounds 5] [--every-ms 20]

With the broker as a process over HTTP, and embedded in the producer's process. One producer that commits a business
transaction every 20 ms, one consumer of one thread without an inbox, both in this process. `floor` publishes straight
to the broker, beside the same business transaction and after its commit: what it takes to publish, store, pull, handle.
Both count from the moment at which the database has committed, before anybody's hooks. Milliseconds; each round's p50
and p99, medians over the rounds. Peers that poll wait for half their interval on top, by design:
pactix 250 ms, outbox-sqs 1 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session

from benchmarks.contestants.business import BODY, KEY, TOPIC, business, engine, make_tables
from benchmarks.harness import report, rounds, servers
from outbox import Outbox, consumer, run_consumers
from outbox.migrate.schema_upgrade import upgrade
from outbox_core import Broker, Delivery, GroupConfig, Message, connect
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.message import encode_body

ARRIVAL_SECONDS_MAX: Final = 30.0
WARM_UP: Final = 20
GROUP: Final = "bench"


@dataclass(slots=True)
class Arrivals:
    """When which message reached its handler, on this process's clock."""

    at: dict[str, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, message_id: str) -> None:
        """The handler's first line."""
        now = time.perf_counter()
        with self.changed:
            self.at.setdefault(message_id, now)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Until so many have come."""
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.at) >= count, ARRIVAL_SECONDS_MAX):
                raise TimeoutError(f"{len(self.at)} of {count} messages reached the handler")


@dataclass(slots=True)
class Commits:
    """When the producer's last transaction was committed."""

    last: float = 0.0

    def note(self, session: Session) -> None:
        """A listener of Session's after_commit; the first one, if it listens before there is an Outbox."""
        if not session.in_nested_transaction():
            self.last = time.perf_counter()


def main() -> None:
    """Measure, and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--messages", type=int, default=300, help="of a round")
    parser.add_argument("--every-ms", type=int, default=20, help="between the beginnings of two transactions")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.messages, chosen.every_ms = 1, 10, 5
    with servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database:
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        tables = create_engine(database.url)
        with tables.begin() as connection:
            make_tables(connection)
        tables.dispose()
        results = {kind: _compare(kind, database, chosen) for kind in ("http", "embedded")}
    for kind, figures in results.items():
        rows = [(name, *figures[name].values()) for name in ("floor", "ours")]
        rows.append(("ours to floor", *figures["ours_to_floor"].values()))
        report.table(f"commit_to_handler, {kind} broker, ms", ("", *figures["floor"]), rows)
    report.emit("commit_to_handler", chosen=chosen, server=server, results=results)


def _compare(kind: str, database: servers.Database, chosen: argparse.Namespace) -> dict[str, Any]:
    with _broker(kind) as broker, contextlib.ExitStack() as stack:
        commits = stack.enter_context(_watching_commits())
        business_engine = engine(database.url)
        box = Outbox(business_engine, broker=broker, schema=database.schema)
        stack.callback(business_engine.dispose)
        stack.callback(box.close)
        cases = {"floor": _straight(business_engine, broker, commits), "ours": _ours(box, commits)}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        arrivals = stack.enter_context(_consuming(broker))
        with report.progress() as bar:
            task = bar.add_task(kind, total=chosen.rounds * len(cases))
            for number in range(chosen.rounds):
                for name in rounds.rotated(list(cases), number):
                    waits = _round(cases[name], arrivals, count=chosen.messages, every_ms=chosen.every_ms)
                    found[name].append(rounds.percentiles(waits))
                    bar.advance(task)
    return _figures(found)


@contextlib.contextmanager
def _watching_commits() -> Iterator[Commits]:
    commits = Commits()
    event.listen(Session, "after_commit", commits.note, insert=True)
    try:
        yield commits
    finally:
        event.remove(Session, "after_commit", commits.note)


@contextlib.contextmanager
def _consuming(broker: Broker) -> Iterator[Arrivals]:
    """One consumer of one thread, for all rounds."""
    arrivals = Arrivals()

    @consumer(TOPIC, group=GROUP)
    def handle(delivery: Delivery) -> None:
        arrivals.note(delivery.id)

    broker.admin.declare_group(TOPIC, GROUP, GroupConfig())
    runner = run_consumers([handle], broker=broker)
    try:
        yield arrivals
    finally:
        runner.stop()


def _round(send: Callable[[int], tuple[str, float]], arrivals: Arrivals, *, count: int, every_ms: int) -> list[float]:
    """Milliseconds from commit to handler of each message."""
    before, began = len(arrivals.at), {}
    pause, next_at = threading.Event(), time.perf_counter()
    for number in range(WARM_UP + count):
        message_id, committed_at = send(number)
        began[message_id] = committed_at
        next_at += every_ms / 1000
        pause.wait(max(0.0, next_at - time.perf_counter()))
    arrivals.wait_for(before + WARM_UP + count)
    return [(arrivals.at[one] - at) * 1000 for one, at in itertools.islice(began.items(), WARM_UP, None)]


def _ours(box: Outbox, commits: Commits) -> Callable[[int], tuple[str, float]]:
    @box.transactional
    def act(session: Session, number: int) -> str:
        business(session, number)
        return box.publish(TOPIC, BODY, key=KEY).id

    def send(number: int) -> tuple[str, float]:
        message_id: str = act(number)
        return message_id, commits.last

    return send


def _straight(business_engine: Engine, broker: Broker, commits: Commits) -> Callable[[int], tuple[str, float]]:
    body = encode_body(BODY)[0]

    def send(number: int) -> tuple[str, float]:
        with Session(business_engine) as session, session.begin():
            business(session, number)
        message = Message(id=new_message_id(), topic=TOPIC, body=body, key=KEY)
        broker.publish([message])
        return message.id, commits.last

    return send


@contextlib.contextmanager
def _broker(kind: str) -> Iterator[Broker]:
    with contextlib.ExitStack() as stack:
        if kind == "http":
            url = stack.enter_context(servers.broker()).url
        else:
            url = f"embedded:{stack.enter_context(tempfile.TemporaryDirectory(prefix='outbox-bench-'))}"
        broker = connect(url)
        stack.callback(broker.close)
        yield broker


def _figures(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    names = list(found["ours"][0])
    medians = {case: {name: rounds.spread([one[name] for one in of])["median"] for name in names}
               for case, of in found.items()}  # fmt: skip
    compared = {
        name: rounds.ratio([one[name] for one in found["ours"]], [one[name] for one in found["floor"]])
        for name in names
    }
    return {**medians, "ours_to_floor": compared}


if __name__ == "__main__":
    main()
