"""Measures pactix's relay on a backlog: the drain to a publisher that accepts at once, or the cost of one claim.

    python -m benchmarks.contestants.pactix_relay drain|claim --rows N --url URL --async-url URL

Runs in the peers' Python; the backlog is made by the server in pactix's own table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from datetime import UTC, datetime

from pactix.config import PactixConfig
from pactix.db.tables import metadata
from pactix.outbox.publisher import PublisherRegistry, PublishOutcome
from pactix.outbox.runner import OutboxRunner
from pactix.outbox.store import OutboxStore
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

CLAIMS = 5
EVENT_TYPE = "bench"


class Accepts:
    """A publisher that accepts at once."""

    async def publish(self, record: object) -> PublishOutcome:  # noqa: ARG002 - the protocol's
        """Published."""
        return PublishOutcome.published()


def main() -> None:
    """Fill, do, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("drain", "claim"))
    parser.add_argument("--rows", type=int, required=True)
    for name in ("--url", "--async-url"):
        parser.add_argument(name, required=True)
    chosen = parser.parse_args()
    _fill(chosen.url, rows=chosen.rows)
    act = _drain if chosen.act == "drain" else _claim
    print(json.dumps(asyncio.run(act(chosen.async_url, rows=chosen.rows))))


async def _drain(url: str, *, rows: int) -> dict[str, float]:
    engine = create_async_engine(url)
    publishers = PublisherRegistry()
    await publishers.register(EVENT_TYPE, Accepts())
    runner = OutboxRunner(OutboxStore(PactixConfig()), publishers)
    started, published = time.perf_counter(), 0
    while published < rows:
        published += (await runner.run_once(engine)).published
    seconds = time.perf_counter() - started
    await engine.dispose()
    return {"seconds": seconds}


async def _claim(url: str, *, rows: int) -> dict[str, float]:  # noqa: ARG001 - both acts are called alike
    """Milliseconds of a claim, and the row locks that its transaction holds; rolled back each time."""
    engine = create_async_engine(url)
    store = OutboxStore(PactixConfig())
    found = [await _one_claim(engine, store) for _ in range(CLAIMS)]
    await engine.dispose()
    ms, locks, claimed = sorted(found)[CLAIMS // 2]
    return {"ms": ms, "row_locks": locks, "rows": claimed}


async def _one_claim(engine: AsyncEngine, store: OutboxStore) -> tuple[float, int, int]:
    locked = text("SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = :id")
    async with engine.connect() as connection, engine.connect() as watcher:
        me = (await connection.execute(text("SELECT CONNECTION_ID()"))).scalar_one()
        started = time.perf_counter()
        rows = await store.claim_ready(connection, datetime.now(UTC))
        ms = (time.perf_counter() - started) * 1000
        # The table is refreshed every 0.1 s at most.
        await asyncio.sleep(0.2)
        locks = (await watcher.execute(locked, {"id": me})).scalar_one()
        await connection.rollback()
        return ms, int(locks), len(rows)


def _fill(url: str, *, rows: int) -> None:
    engine = create_engine(url)
    metadata.create_all(engine)
    insert = text(
        "INSERT INTO outbox_message (id, message_id, event_type, message_key, payload, headers, status, attempts, "
        "max_attempts, available_at, created_at, updated_at) "
        "SELECT SUBSTR(SHA2(:base + n, 256), 1, 32), CONCAT('m', :base + n), :type, "
        "'k', JSON_OBJECT('text', REPEAT('x', 480)), '{}', 'pending', 0, 10, "
        "TIMESTAMPADD(MICROSECOND, :base + n, :at), TIMESTAMPADD(MICROSECOND, :base + n, :at), :at "
        "FROM bench_number WHERE n < :count"
    )
    at = datetime.fromtimestamp(time.time() - 3600, UTC).replace(tzinfo=None)
    with engine.connect() as connection:
        connection.execute(text("TRUNCATE TABLE outbox_message"))
        connection.execute(text("SET SESSION sql_log_bin = 0"))
        for base in range(0, rows, 10_000):
            values = {"base": base, "count": min(10_000, rows - base), "at": at, "type": EVENT_TYPE}
            connection.execute(insert, values)
            connection.commit()
        connection.execute(text("SET SESSION sql_log_bin = 1"))
    engine.dispose()


if __name__ == "__main__":
    main()
