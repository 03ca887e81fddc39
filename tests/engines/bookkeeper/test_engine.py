"""A whole engine on real bookies, of which the next owner has nothing but the ledgers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers
from outbox_broker.cluster.bookkeeper.shard_znodes import ShardZnodes
from outbox_broker.segments.ledger import LedgerSegments
from outbox_broker.segments.ledger_takeover import Shard
from outbox_core.common.clock import ManualClock
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.test_engine_takeover import (  # noqa: F401 - what holds on ledgers in memory
    Owners,
    test_what_was_acknowledged_is_there_for_each_owner_and_the_deposed_one_acknowledges_nothing,
)

SHARD = "0-0000"
_roots = itertools.count(1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def owners(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, zookeeper: Any, tmp_path: Path, clock: ManualClock
) -> Iterator[Owners]:
    """No owner yet, of a shard of the test's own."""
    root = f"/outbox/engine-{os.getpid()}-{next(_roots)}"
    manifests = ShardZnodes(zookeeper, root, request_ms_max=60_000)

    shard = Shard(cluster=root, name=SHARD, ledgers=ledgers, manifests=manifests, clock=clock)
    with ExitStack() as stack:
        yield Owners(tmp_path, clock, stack, lambda: LedgerSegments.open(shard))
