"""The cluster that the tests of this folder share, and a shop on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from tests.engines.galera.galera_cluster import GaleraCluster, galera_cluster
from tests.outbox.shop import Shop, open_shop
from tests.outbox.shop_fixtures import broker

__all__ = ["broker"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[GaleraCluster]:
    """Three nodes and a balancer."""
    with galera_cluster() as running:
        yield running


@pytest.fixture
def galera_shop(cluster: GaleraCluster) -> Iterator[Shop]:
    """A shop on the cluster, of which each node has the tables. Its own engine, by which a test asks, is at the first
    node and waits for the others.
    """
    with cluster.nodes[0].fresh_database() as database, open_shop(database) as shop:
        event.listen(shop.engine, "connect", _wait_for_other_nodes)
        shop.engine.dispose()
        for node in cluster.nodes:
            _wait_for_tables(create_engine(cluster.url(database.url, node), poolclass=NullPool))
        yield shop


def _wait_for_tables(engine: Engine) -> None:
    """Return once a node has applied what was made on the others: a business's first transaction may be there."""
    event.listen(engine, "connect", _wait_for_other_nodes)
    with engine.connect() as connection:
        connection.exec_driver_sql("SHOW TABLES").all()


def _wait_for_other_nodes(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION wsrep_sync_wait = 15")
