"""Which bookies accept entries, as ZooKeeper has them registered, and what an operator is told about their number."""

from __future__ import annotations

import itertools

import pytest

from outbox_broker.cluster.bookie_list import BookieList, read_bookies
from outbox_core.common.errors import ConfigurationError
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.fixtures.zookeeper_server import ZooKeeper

OPTIONS = SessionOptions(session_ms=30_000, request_ms_max=60_000)
_numbers = itertools.count()


def registered(server: ZooKeeper, *paths: str) -> str:
    """Register bookies as BookKeeper does; returns the metadataServiceUri."""
    root = f"/bookies{next(_numbers)}"
    session = ZooKeeperSession(ZooKeeperAddress(hosts=server.hosts, root=root), options=OPTIONS)
    for path in ("available", *(f"available/{path}" for path in paths)):
        session.create(f"{root}/{path}", b"")
    session.close()
    return f"zk+longhierarchical://{server.hosts}{root}"


def test_registered_bookies_are_listed_and_those_that_are_read_only_apart(running_zookeeper: ZooKeeper) -> None:
    uri = registered(running_zookeeper, "b1:3181", "b2:3181", "readonly", "readonly/b3:3181")

    bookies = read_bookies(uri, options=OPTIONS, ensemble=3)

    assert bookies.writable == ("b1:3181", "b2:3181")
    assert bookies.read_only == ("b3:3181",)
    assert "no shard opened" in str(bookies.warning)


def test_a_place_without_bookkeeper_is_refused_with_the_cure(running_zookeeper: ZooKeeper) -> None:
    with pytest.raises(ConfigurationError, match="correct ledgers_uri"):
        read_bookies(f"zk://{running_zookeeper.hosts}/nothing", options=OPTIONS, ensemble=3)


def test_a_uri_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ledgers_uri looks like"):
        read_bookies("etcd://host/ledgers", options=OPTIONS, ensemble=3)


@pytest.mark.parametrize(("count", "said"), [(2, "no ledger can be made"), (3, "no bookie can be spared"), (4, None)])
def test_a_cluster_without_a_spare_bookie_says_so(count: int, said: str | None) -> None:
    bookies = BookieList(writable=tuple(map(str, range(count))), read_only=(), ensemble=3)

    assert (bookies.warning is None) if said is None else (said in bookies.as_text())
    assert bookies.as_data()["warning"] == bookies.warning
