"""Publishes to Apache Pulsar by the adapter, and by the plainest fast programs with its client, at equal durability.

    ./scripts/test --engines pulsar      # once: fetches the server's jars
    python -m benchmarks.broker_adapter.pulsar_publish --json > pulsar.json

All publish 512 bytes with one id as a property to one topic that has a subscription, on one server whose bookie syncs
its journal before it answers: 500 messages whose receipts are awaited together, and one at a time. `plain` sends each
message by itself, as the adapter does; `plain_batched` lets the client put them into batches, each of which goes to one
consumer, and again as a whole where one of its messages is not acknowledged. Rounds are rotated, figures
are medians, in messages a second; the ratio is to the faster plain program of each kind.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pulsar

from benchmarks.broker_adapter.publish_rounds import BODY, TOPIC, Publisher, arguments, compare, report
from tests.engines import pulsar as engine_tests
from tests.engines.jars import fetched_jars
from tests.engines.pulsar.pulsar_engine import PulsarEngine
from tests.engines.pulsar.pulsar_server import PulsarServer

ANSWER_SECONDS_MAX = 60


class Plain:
    """pulsar-client: messages sent, and their receipts awaited together."""

    def __init__(self, addresses: str, ids: Iterator[int], *, batched: bool) -> None:
        self.name = "plain_batched" if batched else "plain"
        quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        self._client = pulsar.Client(f"pulsar://{addresses}", logger=quiet)
        self._producer = self._client.create_producer(
            TOPIC, batching_enabled=batched, batching_max_publish_delay_ms=1, block_if_queue_full=True
        )
        self._ids = ids
        self._all = threading.Event()
        self._results: list[pulsar.Result] = []

    def publish(self, count: int) -> None:
        self._all.clear()
        self._results = []

        def note(result: pulsar.Result, _: object) -> None:
            self._results.append(result)
            if len(self._results) == count:
                self._all.set()

        for _ in range(count):
            self._producer.send_async(BODY, note, properties={"outbox-id": f"p{next(self._ids)}"})
        if self.name == "plain_batched":
            self._producer.flush()
        assert self._all.wait(ANSWER_SECONDS_MAX)
        assert set(self._results) == {pulsar.Result.Ok}

    def close(self) -> None:
        self._client.close()


def plain(addresses: str, ids: Iterator[int]) -> Sequence[Publisher]:
    """With the client's batches and without."""
    return [Plain(addresses, ids, batched=batched) for batched in (False, True)]


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on a server of their own."""
    jars = fetched_jars(Path(engine_tests.__path__[0]) / "pom.xml")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        server = PulsarServer(jars=jars, folder=Path(folder))
        try:
            server.start()
            with PulsarEngine(server) as engine:
                engine.make_topic(TOPIC)
            return compare(f"pulsar://{server.addresses}", lambda ids: plain(server.addresses, ids), chosen)
        finally:
            server.close()


def main() -> None:
    chosen = arguments(__doc__, batches=20, singles=200).parse_args()
    report("Apache Pulsar", run(chosen), chosen)


if __name__ == "__main__":
    main()
