"""The example of a consumer on RocketMQ: the effect happens once, whenever the consumer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.rocketmq.rocketmq_cluster import PASSWORD, USER, RocketMqCluster
from tests.examples.foreign_consumer import DONE, GROUP, TOPIC, ForeignConsumer, check_one_effect, marks
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["sqlite_shop"]

NAME = TOPIC.replace(".", "_")


@pytest.mark.parametrize("step", sorted(DONE))
def test_a_consumer_of_rocketmq_has_each_effect_once(
    sqlite_shop: Shop, cluster: RocketMqCluster, tmp_path: Path, step: str
) -> None:
    cluster.client.delete_topic(NAME)
    cluster.client.make_topic(NAME, kind="NORMAL", queues=1)
    cluster.client.make_group(GROUP)
    consumer = ForeignConsumer(
        program=("rocketmq_consumer.py",),
        environment={
            "DATABASE_URL": sqlite_shop.database.url, "ROCKETMQ": cluster.proxy, "ACCESS_KEY": USER,
            "SECRET_KEY": PASSWORD, "HOME": str(tmp_path),
        },
        broker_url=cluster.url(),
        unsettled=lambda: _unsettled(sqlite_shop, cluster),
    )  # fmt: skip

    check_one_effect(sqlite_shop, consumer, step=step)


def _unsettled(shop: Shop, cluster: RocketMqCluster) -> int:
    """Those that were not handed out, and those that have no mark: what is handed out RocketMQ does not count."""
    published = len(cluster.client.read(NAME))
    return cluster.client.unsettled(NAME, GROUP) + published - len(marks(shop))
