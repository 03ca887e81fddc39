"""Measures how soon a compensator sends the rows of a killed producer.

    python -m benchmarks.recovery [--rounds 5] [--lease-ms 3000,20000] [--rows 50]

A producer process commits, its sender sends nothing (its broker never answers), and it is killed with signal 9 at once.
Its rows belong to it until their lease ends. Seconds from the commit of the last row until the broker has all of them,
and how much of that came after the lease. The compensator is `outbox compensator run` as it comes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.harness import report, rounds, servers
from outbox import Outbox, SenderLimits
from outbox.migrate.schema_upgrade import upgrade
from outbox_core import Broker, Message, PublishResult, connect
from outbox_core.common.errors import BrokerUnavailable

TOPIC: Final = "bench"
WAIT_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.01
_COMMITTED: Final = "committed"


class SilentBroker:
    """Never answers, as if the process had stopped just before it sent."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:  # noqa: ARG002 - the protocol's
        """Wait for the end."""
        threading.Event().wait()
        raise BrokerUnavailable("silent")

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    """Measure, and print; with --produce be the producer that is killed."""
    parser = report.arguments(__doc__)
    parser.add_argument("--lease-ms", default="3000,20000", help="the senders' leases; 20 s is the default of the SDK")
    parser.add_argument("--rows", type=int, default=50, help="what the producer leaves behind")
    parser.add_argument("--produce", nargs=3, metavar=("URL", "SCHEMA", "LEASE_MS"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.produce:
        url, schema, lease_ms = chosen.produce
        _produce(url, schema=schema, lease_ms=int(lease_ms), rows=chosen.rows)
        return
    if chosen.quick:
        chosen.rounds, chosen.lease_ms, chosen.rows = 1, "1000", 5
    with (
        servers.database(kind=chosen.server, url=chosen.url, memory_mb=chosen.memory_mb) as database,
        servers.broker() as broker,
    ):
        server = database.settings()
        upgrade(database.url, schema=database.schema)
        command = ["compensator", "run", "--url", database.url, "--schema", database.schema, "--broker", broker.url]
        with servers.outbox_process(command) as compensator:
            results = _measure(database, broker.url, chosen)
            if compensator.poll() is not None:
                raise RuntimeError("the compensator ended")
    rows = [(f"lease {lease} ms", *figures["after_lease_seconds"].values()) for lease, figures in results.items()]
    report.table("sent, seconds after the lease", ("", "median", "min", "max"), rows)
    report.emit("recovery", chosen=chosen, server=server, results={"by_lease_ms": results})


def _measure(database: servers.Database, broker_url: str, chosen: argparse.Namespace) -> dict[str, Any]:
    broker = connect(broker_url)
    found: dict[str, Any] = {}
    with report.progress() as bar:
        leases = [int(lease) for lease in chosen.lease_ms.split(",")]
        task = bar.add_task("killed producers", total=len(leases) * chosen.rounds)
        for lease_ms in leases:
            seconds = []
            for _ in range(chosen.rounds):
                seconds.append(_kill_one(database, broker, lease_ms=lease_ms, rows=chosen.rows))
                bar.advance(task)
            after = [one - lease_ms / 1000 for one in seconds]
            found[str(lease_ms)] = {"seconds": rounds.spread(seconds), "after_lease_seconds": rounds.spread(after)}
    broker.close()
    return found


def _kill_one(database: servers.Database, broker: Broker, *, lease_ms: int, rows: int) -> float:
    """Seconds from the last commit of a producer that is killed then, until the broker has all its messages."""
    before = _stored(broker)
    command = [sys.executable, "-m", "benchmarks.recovery", "--rows", str(rows)]
    command += ["--produce", database.url, database.schema, str(lease_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=servers.environment()) as producer:
        assert producer.stdout is not None
        said = producer.stdout.readline().strip()
        committed_at = time.monotonic()
        producer.kill()
    if said != _COMMITTED:
        raise RuntimeError("the producer did not commit")
    pause = threading.Event()
    while _stored(broker) < before + rows:
        if time.monotonic() - committed_at > WAIT_SECONDS_MAX + lease_ms / 1000:
            raise TimeoutError("the rows were not sent")
        pause.wait(_POLL_SECONDS)
    return time.monotonic() - committed_at


def _stored(broker: Broker) -> int:
    return int(broker.admin.figures(TOPIC)["stored"]) if TOPIC in broker.admin.topics() else 0


def _produce(url: str, *, schema: str, lease_ms: int, rows: int) -> None:
    """Commit, say so, and wait to be killed."""
    engine = create_engine(url)
    limits = SenderLimits(lease_ms=lease_ms, lease_margin_ms=lease_ms // 2)
    box = Outbox(engine, broker=SilentBroker(), schema=schema, sender=limits)  # type: ignore[arg-type]
    with Session(engine) as session, session.begin():
        for number in range(rows):
            box.publish(TOPIC, {"number": number}, session=session)
    print(_COMMITTED, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
