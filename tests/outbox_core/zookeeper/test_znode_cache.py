"""Reads of ZooKeeper that are kept until a change is reported, and reads that a change overtakes."""

from __future__ import annotations

import threading

from outbox_core.zookeeper.znode_cache import ZnodeCache, children_key
from outbox_core.zookeeper.zookeeper_session import SessionOptions, ZooKeeperSession
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperAddress
from tests.fixtures.zookeeper_server import ZooKeeper
from tests.outbox_broker.cluster.conftest import eventually

OPTIONS = SessionOptions(session_ms=30_000, request_ms_max=60_000)
READS_MIN, ROUNDS_MIN = 100, 300


def value(cache: ZnodeCache, key: str) -> object:
    hit = cache.get(key)
    return "to be read" if hit is None else hit.value


def test_what_was_read_is_kept_until_its_znode_changes() -> None:
    cache = ZnodeCache()
    cache.put("/a", 1, began=cache.begin())
    cache.put("/b", None, began=cache.begin())
    cache.forget("/a")

    assert (value(cache, "/a"), value(cache, "/b")) == ("to be read", None)


def test_a_read_that_a_change_overtakes_is_not_kept_and_the_next_one_is() -> None:
    cache = ZnodeCache()
    began = cache.begin()
    cache.forget("/a")
    cache.put("/a", "old", began=began)
    assert value(cache, "/a") == "to be read"

    cache.put("/a", "new", began=cache.begin())
    assert value(cache, "/a") == "new"


def test_a_lost_connection_forgets_everything_and_what_was_being_read() -> None:
    cache = ZnodeCache()
    cache.put("/a", 1, began=cache.begin())
    began = cache.begin()
    cache.forget_all()
    cache.put("/b", 2, began=began)

    assert (value(cache, "/a"), value(cache, "/b")) == ("to be read", "to be read")


def test_a_znode_that_changes_forgets_the_list_of_its_children() -> None:
    cache = ZnodeCache()
    cache.put(children_key("/a"), ("b",), began=cache.begin())
    cache.forget("/a")

    assert value(cache, children_key("/a")) == "to be read"


def test_a_znode_that_changes_all_the_time_is_never_read_as_missing(running_zookeeper: ZooKeeper) -> None:
    address = ZooKeeperAddress(hosts=running_zookeeper.hosts, root="/changing")
    reader, writer = (ZooKeeperSession(address, options=OPTIONS) for _ in range(2))
    paths = [f"/changing/{number}" for number in range(4)]
    for path in paths:
        writer.create(path, b"")
    is_enough = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not is_enough.is_set():
            for path in paths:
                writer.write(path, str(written + 1).encode())
            written += 1

    thread = threading.Thread(target=write)
    thread.start()
    missing = reads = 0
    while thread.is_alive() and (reads < READS_MIN or written < ROUNDS_MIN):
        missing += reader.read_all(paths).count(None)
        reads += 1
    is_enough.set()
    thread.join()
    last = str(written).encode()

    def has_the_last_values() -> bool:
        return [znode.data for znode in reader.read_all(paths) if znode is not None] == [last] * 4

    # A cached value is read until ZooKeeper has reported its change to this session.
    eventually(has_the_last_values, what="the last values are read")
    reader.close()
    writer.close()

    assert missing == 0, f"of {reads} reads"
    assert (reads >= READS_MIN, written >= ROUNDS_MIN) == (True, True)
