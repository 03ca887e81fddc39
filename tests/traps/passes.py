"""A compensator's pass over a shop on an engine of the test's choice. Not a test."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import RelayPolicy
from outbox.store.database import background_engine
from outbox_core import Broker
from tests.fixtures.table_scan import Scan
from tests.outbox.shop import Shop


def one_pass(shop: Shop, broker: Broker, *, engine: Engine, batch_rows: int = 200) -> None:
    """A pass and the figures that follow it; errors of the database come out as ours."""
    background = background_engine(engine)
    scan = Scan(
        engine=background,
        store=shop.store,
        broker=broker,
        policy=RelayPolicy(outage_delay_ms=60_000),
        batch_rows=batch_rows,
    )
    try:
        scan.run()
        scan.backlog()
    finally:
        background.dispose()


def compensate(shop: Shop, broker: Broker) -> None:
    """What a compensator on a sound connection does once all leases are over, until nothing is left."""
    shop.end_leases()
    one_pass(shop, broker, engine=shop.engine)
    assert shop.rows() == []
