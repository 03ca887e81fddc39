"""Publishes to Redis by the adapter, and by the plainest fast programs with its client, at equal durability.

    python -m benchmarks.broker_adapter.redis.publish --json > redis.json

All publish 512 bytes to one stream of a server that syncs before it answers (`appendfsync always`), in batches of 500
and one at a time. Plain programs are redis-py's pipeline of XADD, which knows no repeats, and the same with a SET NX
for each message, which knows them as the adapter does. `--replica` adds a replica, and WAIT 1 for all. Rounds are
rotated, figures are medians, in messages a second; the ratio is to the faster plain program of each kind.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis

from benchmarks.broker_adapter.publish_rounds import BODY, Publisher, arguments, compare, report
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server, replica_of

WAIT_MS = 8_000


class Plain:
    """A pipeline of XADD with the adapter's fields, and WAIT where there is a replica."""

    def __init__(self, port: int, ids: Iterator[int], *, replicas: int, drops_repeats: bool) -> None:
        self.name = "plain_dedup" if drops_repeats else "plain"
        self._client: Any = redis.Redis(host=HOST, port=port, protocol=2)
        self._replicas = replicas
        self._drops_repeats = drops_repeats
        self._ids = ids

    def publish(self, count: int) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for _ in range(count):
            one = f"p{next(self._ids)}"
            if self._drops_repeats:
                pipeline.set(f"{self.name}:{one}", 1, nx=True, px=3_600_000)
            pipeline.xadd(self.name, {"id": one, "body": BODY, "created-at-ms": "1"})
        if self._replicas:
            pipeline.wait(self._replicas, WAIT_MS)
        answers = pipeline.execute()
        assert not self._replicas or answers[-1] >= self._replicas

    def close(self) -> None:
        self._client.close()


def plain(port: int, ids: Iterator[int], *, replicas: int) -> Sequence[Publisher]:
    """With and without repeats."""
    return [Plain(port, ids, replicas=replicas, drops_repeats=drops_repeats) for drops_repeats in (False, True)]


@contextlib.contextmanager
def servers(chosen: argparse.Namespace) -> Iterator[RedisServer]:
    """A durable server, with a replica where that is asked for."""
    folder = chosen.folder or tempfile.gettempdir()  # where syncs are real, and not the RAM disk of the tests
    with redis_server(in_folder=folder) as server, replica_of(server) if chosen.replica else contextlib.nullcontext():
        yield server


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on a server of their own."""
    replicas = int(chosen.replica)
    with servers(chosen) as server:
        url = f"redis://{HOST}:{server.port}/?wait={replicas}"
        return compare(url, lambda ids: plain(server.port, ids, replicas=replicas), chosen)


def main() -> None:
    parser = arguments(__doc__, batches=20, singles=500)
    parser.add_argument("--replica", action="store_true", help="with a replica, and WAIT 1")
    chosen = parser.parse_args()
    report("Redis", run(chosen), chosen)


if __name__ == "__main__":
    main()
