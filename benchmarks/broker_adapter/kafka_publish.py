"""Publishes to Apache Kafka by the adapter, and by the plainest fast programs with its client, at equal durability.

    ./scripts/test --engines kafka      # once: fetches the server's jars
    python -m benchmarks.broker_adapter.kafka_publish --json > kafka.json

All publish 512 bytes with one id as a header to one topic (`acks=all`, idempotent), in batches of 500 whose reports are
awaited together, and one at a time. Plain programs have librdkafka's linger of 5 ms, or none. Rounds are rotated,
figures are medians, in messages a second; the ratio is to the faster plain program of each kind.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Producer

from benchmarks.broker_adapter.publish_rounds import BODY, TOPIC, Publisher, arguments, compare, report
from tests.engines import kafka
from tests.engines.jars import fetched_jars
from tests.engines.kafka.kafka_cluster import KafkaCluster


class Plain:
    """confluent-kafka: messages produced, and their delivery reports awaited together."""

    def __init__(self, addresses: str, ids: Iterator[int], *, linger_ms: int) -> None:
        self.name = f"plain_linger_{linger_ms}"
        settings = {"acks": "all", "enable.idempotence": True, "linger.ms": linger_ms}
        self._producer = Producer({"bootstrap.servers": addresses, **settings})
        self._ids = ids
        self._stored = 0

    def publish(self, count: int) -> None:
        self._stored = 0
        for _ in range(count):
            headers = [("outbox-id", f"p{next(self._ids)}".encode())]
            self._producer.produce(TOPIC, BODY, headers=headers, on_delivery=self._note)
        assert self._producer.flush(60) == 0
        assert self._stored == count

    def close(self) -> None:
        self._producer.close()

    def _note(self, error: KafkaError | None, _: object) -> None:
        self._stored += error is None


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on a cluster of their own."""
    jars = fetched_jars(Path(kafka.__path__[0]) / "pom.xml")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        cluster = KafkaCluster(jars=jars, folder=Path(folder), nodes=chosen.nodes)
        try:
            cluster.start()
            cluster.make_topic(TOPIC)
            return compare(f"kafka://{cluster.addresses()}", lambda ids: plain(cluster.addresses(), ids), chosen)
        finally:
            cluster.stop()


def plain(addresses: str, ids: Iterator[int]) -> Sequence[Publisher]:
    """With and without the client's default linger."""
    return [Plain(addresses, ids, linger_ms=linger_ms) for linger_ms in (0, 5)]


def main() -> None:
    parser = arguments(__doc__, batches=20, singles=300)
    parser.add_argument("--nodes", type=int, default=3, help="each has every message; of three, two confirm")
    chosen = parser.parse_args()
    report("Apache Kafka", run(chosen), chosen)


if __name__ == "__main__":
    main()
