"""The example of a consumer on Pulsar: the effect happens once, whenever the consumer is killed."""

from __future__ import annotations

import pytest

from tests.engines.pulsar.pulsar_server import PulsarServer
from tests.examples.foreign_consumer import DONE, GROUP, TOPIC, ForeignConsumer, check_one_effect
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["sqlite_shop"]

PATH = f"persistent/public/default/{TOPIC}"


@pytest.mark.parametrize("step", sorted(DONE))
def test_a_consumer_of_pulsar_has_each_effect_once(sqlite_shop: Shop, server: PulsarServer, step: str) -> None:
    topics = server.ask("GET", "persistent/public/default").json()
    if f"persistent://public/default/{TOPIC}" in topics:
        server.ask("DELETE", f"{PATH}?force=true")
    server.create_topic(TOPIC)
    server.create_subscription(TOPIC, GROUP)
    consumer = ForeignConsumer(
        program=("pulsar_consumer.py",),
        environment={"DATABASE_URL": sqlite_shop.database.url, "PULSAR_URL": f"pulsar://{server.addresses}"},
        broker_url=f"pulsar://{server.addresses}",
        unsettled=lambda: int(server.ask("GET", f"{PATH}/stats").json()["subscriptions"][GROUP]["msgBacklog"]),
    )

    check_one_effect(sqlite_shop, consumer, step=step)
