"""Measures outbox-sqs's relay on a backlog: the drain to a publisher that accepts at once, or the cost of one claim.

    python -m benchmarks.contestants.outbox_sqs_relay drain|claim --rows N --url URL --async-url URL

Runs in the peers' Python; the backlog is made by the server in outbox-sqs's own table.
"""

from __future__ import annotations

import argparse
import json
import time

from outbox_sqs import Base, InMemoryPublisher, Relay
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

DRAIN_BATCH = 200
CLAIM_BATCH = 100
CLAIMS = 5


def main() -> None:
    """Fill, do, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("drain", "claim"))
    parser.add_argument("--rows", type=int, required=True)
    for name in ("--url", "--async-url"):
        parser.add_argument(name, required=True)
    chosen = parser.parse_args()
    engine = create_engine(chosen.url)
    _fill(engine, rows=chosen.rows)
    batch = DRAIN_BATCH if chosen.act == "drain" else CLAIM_BATCH
    relay = Relay(sessionmaker(engine, expire_on_commit=False), InMemoryPublisher(), batch_size=batch)
    print(json.dumps(_drain(relay) if chosen.act == "drain" else _claim(relay)))
    engine.dispose()


def _drain(relay: Relay) -> dict[str, float]:
    started = time.perf_counter()
    while relay.run_once():
        pass
    return {"seconds": time.perf_counter() - started}


def _claim(relay: Relay) -> dict[str, float]:
    """Milliseconds of a claim; it commits by itself, so what it locked cannot be seen."""
    found = []
    for number in range(CLAIMS):
        started = time.perf_counter()
        relay._claim(f"claim-{number}")  # noqa: SLF001 - the one way to claim and not to send
        found.append((time.perf_counter() - started) * 1000)
    return {"ms": sorted(found)[CLAIMS // 2], "rows": CLAIM_BATCH}


def _fill(engine: Engine, *, rows: int) -> None:
    Base.metadata.create_all(engine)
    insert = text(
        "INSERT INTO outbox_events (destination, payload, status, attempts, available_at, created_at) "
        "SELECT 'bench', REPEAT('x', 480), 'pending', 0, UTC_TIMESTAMP() - INTERVAL 1 HOUR, "
        "UTC_TIMESTAMP() - INTERVAL 1 HOUR FROM bench_number WHERE n < :count"
    )
    with engine.connect() as connection:
        connection.execute(text("TRUNCATE TABLE outbox_events"))
        connection.execute(text("SET SESSION sql_log_bin = 0"))
        for base in range(0, rows, 10_000):
            connection.execute(insert, {"count": min(10_000, rows - base)})
            connection.commit()
        connection.execute(text("SET SESSION sql_log_bin = 1"))


if __name__ == "__main__":
    main()
