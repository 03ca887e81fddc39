"""What the compensator's tests start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from compensator.service.service import CompensatorService
from compensator.work.source import Source
from outbox_core import Broker, ManualClock
from tests.compensator.serving import Serve, Sources, WatchedMetrics, gates_of, serving, source_of
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import broker, embedded, fresh_mysql_shop, mysql_shop, shop, sqlite_shop

__all__ = ["broker", "embedded", "fresh_mysql_shop", "metrics", "mysql_shop", "serve", "shop", "sources", "sqlite_shop"]


@pytest.fixture
def metrics() -> WatchedMetrics:
    """Metrics to watch."""
    return WatchedMetrics()


@pytest.fixture
def serve(metrics: WatchedMetrics) -> Iterator[Serve]:
    """Makes services over one shop or several; they are stopped at the end of the test."""
    services: list[CompensatorService] = []
    closing: list[Callable[[], None]] = []

    def make(shops: Shop | list[Shop], broker: Broker | list[Broker], **options: Any) -> CompensatorService:
        shops = shops if isinstance(shops, list) else [shops]
        brokers = broker if isinstance(broker, list) else [broker] * len(shops)
        service, close = serving(shops, brokers, metrics=options.pop("metrics", metrics), **options)
        services.append(service)
        closing.append(close)
        return service

    yield make
    for service in services:
        service.stop()
    for close in closing:
        close()


@pytest.fixture
def sources(clock: ManualClock) -> Iterator[Sources]:
    """Makes sources on the test's clock, for Simulation; their connections are closed at the end of the test."""
    with ExitStack() as closing:
        gates = gates_of(clock)

        def make(shop: Shop, broker: Broker, **options: Any) -> Source:
            options = {"gates": gates, "clock": clock, **options}
            source, engines = source_of(shop, broker, **options)
            closing.callback(engines.close)
            return source

        yield make
