"""Compensators that share sources and slots by leases in a real ZooKeeper: offers, sessions, outages, settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compensator.assignment import LeasedAssignment, LeaseOptions, UnleasedAssignment
from compensator.core.config import load
from compensator.entry.composition import wire
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.logs import event_name
from tests.compensator.assignment.fleet import names
from tests.compensator.assignment.zookeeper_fleet import ZooKeeperFleet
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy
from tests.fixtures.zookeeper_server import ZooKeeper, zookeeper
from tests.outbox_broker.cluster.conftest import eventually

RESTART_MS = 6_000
"""A client waits as long for a server's answer to its connection, which one that just starts may not give."""
REQUEST_MS_MAX = 1_000
PINGS_BYTES_MAX = 10 * 12
"""A ping is 12 bytes, and the session sends one in ten seconds; a request for one znode has more than 40."""


@pytest.fixture
def zookeeper_fleet(running_zookeeper: ZooKeeper) -> Iterator[ZooKeeperFleet]:
    """Instances on the tests' ZooKeeper."""
    made = ZooKeeperFleet(running_zookeeper.hosts)
    yield made
    made.close()


def test_what_another_took_of_an_offer_stays_its_own_when_who_offered_it_releases(
    zookeeper_fleet: ZooKeeperFleet,
) -> None:
    one, two = zookeeper_fleet.instance(), zookeeper_fleet.instance()
    sources = names(10)
    one.beat(sources)
    taken: set[str] = set()

    def has_taken() -> bool:
        one.beat(sources) if not taken else None
        taken.update(two.beat(sources))
        return len(taken) == 5

    eventually(has_taken, what="the offered sources taken")
    one.beat(names(1, prefix="another"))  # it releases all that it believes to have

    assert {name for name, holder in zookeeper_fleet.holders().items() if holder == two.instance} >= taken


def test_one_whose_session_ended_comes_back_as_another(zookeeper_fleet: ZooKeeperFleet) -> None:
    one = zookeeper_fleet.instance()
    one.beat(names(1))
    former = one.instance

    zookeeper_fleet.die(one)

    assert zookeeper_fleet.settle([one], names(1)) == [{"source-0000"}]
    assert one.instance not in {former, ""}


def test_a_beat_without_a_change_asks_zookeeper_nothing(running_zookeeper: ZooKeeper) -> None:
    with cutting_tcp_proxy(running_zookeeper.port) as proxy:
        fleet = ZooKeeperFleet(running_zookeeper.hosts)
        one = fleet.instance(hosts=f"127.0.0.1:{proxy.port}")
        sources = names(50)
        held: list[frozenset[str]] = []

        def is_quiet() -> bool:  # not before ZooKeeper has told the session of the leases that it took
            sent = len(proxy.requests)
            held.extend(one.beat(sources) for _ in range(10))
            return len(proxy.requests) - sent <= PINGS_BYTES_MAX

        eventually(is_quiet, what="ten beats without a request")

        assert {len(names_held) for names_held in held} == {50}
        fleet.close()


@pytest.mark.slow
def test_an_instance_that_is_cut_off_keeps_what_it_has_and_the_others_take_it_when_its_session_ends(
    running_zookeeper: ZooKeeper,
) -> None:
    with cutting_tcp_proxy(running_zookeeper.port) as proxy:
        fleet = ZooKeeperFleet(running_zookeeper.hosts)
        options = {"session_ms": 2_000, "request_ms_max": REQUEST_MS_MAX}
        one, two = fleet.instance(hosts=f"127.0.0.1:{proxy.port}", **options), fleet.instance()
        sources = names(10)
        before, _ = fleet.settle([one, two], sources)
        former = one.instance

        proxy.partition()
        kept: list[frozenset[str]] = []

        def is_taken() -> bool:
            kept.append(one.beat(sources))
            return len(two.beat(sources)) == 10

        eventually(is_taken, what="the other instance with everything")
        failed = one.failed_beats
        proxy.heal()
        shares = fleet.settle([one, two], sources)

        assert set(kept) == {before}
        assert failed > 0
        assert [len(held) for held in shares] == [5, 5]
        assert one.instance != former
        fleet.close()


@pytest.mark.slow
def test_while_zookeeper_is_out_each_keeps_what_it_has_and_after_some_beats_serves_everything(tmp_path: Path) -> None:
    with zookeeper(tmp_path / "zookeeper") as server:
        fleet = ZooKeeperFleet(server.hosts)
        options = LeaseOptions(alone_after_beats=2)
        one, two = (
            fleet.instance(options=options, session_ms=RESTART_MS, request_ms_max=REQUEST_MS_MAX) for _ in range(2)
        )
        sources = names(10)
        before, _ = fleet.settle([one, two], sources)

        server.kill9()
        held: dict[int, frozenset[str]] = {}
        while one.failed_beats < 2:  # a beat before the loss is noticed succeeds by what is cached
            share = one.beat(sources)
            held[one.failed_beats] = share
        server.start()
        shares = fleet.settle([one, two], sources)
        fleet.close()

    assert held.pop(0, before) == before
    assert held == {1: before, 2: {source.name for source in sources}}
    assert [len(share) for share in shares] == [5, 5]


@pytest.mark.slow
def test_an_instance_that_finds_no_zookeeper_serves_nothing_then_everything_then_its_share(
    running_zookeeper: ZooKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    with cutting_tcp_proxy(running_zookeeper.port) as proxy:
        fleet = ZooKeeperFleet(running_zookeeper.hosts)
        one = fleet.instance(
            hosts=f"127.0.0.1:{proxy.port}",
            request_ms_max=REQUEST_MS_MAX,
            options=LeaseOptions(alone_after_beats=3),
        )
        sources = names(10)

        proxy.cut_off()
        with caplog.at_level(logging.INFO, logger="compensator"):
            alone = [one.beat(sources) for _ in range(3)]
        proxy.heal()
        shares = fleet.settle([one, fleet.instance()], sources)
        fleet.close()

    assert [len(held) for held in alone] == [0, 0, 10]
    assert [len(held) for held in shares] == [5, 5]
    told = [record for record in caplog.records if record.name.startswith("compensator")]
    assert [event_name(record) for record in told[:4]] == [*["assignment_beat_failed"] * 3, "sources_assigned"]
    assert "no ZooKeeper server" in told[0].error


def test_records_that_an_operator_deleted_come_back(zookeeper_fleet: ZooKeeperFleet) -> None:
    one, two = zookeeper_fleet.instance(), zookeeper_fleet.instance()
    sources = names(10)
    zookeeper_fleet.settle([one, two], sources)

    zookeeper_fleet.delete_all()

    assert [len(held) for held in zookeeper_fleet.settle([one, two], sources)] == [5, 5]
    assert len(zookeeper_fleet.holders()) == 10


@pytest.mark.own_process
def test_a_forked_process_is_an_instance_of_its_own(zookeeper_fleet: ZooKeeperFleet) -> None:
    one = zookeeper_fleet.instance()
    one.beat(names(4))
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        held = one.beat(names(4))
        os.write(writing, f"{one.instance} {len(held)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        instance, held_there = pipe.read().split()

    assert instance not in {one.instance, ""}
    assert held_there == "0"
    assert len(one.beat(names(4))) == 4
    assert one.failed_beats == 0


@pytest.mark.parametrize(("path", "data"), [("/leases/strange", b"not ours"), ("/leases/permanent", b"{}")])
def test_a_path_that_another_program_uses_is_named(zookeeper_fleet: ZooKeeperFleet, path: str, data: bytes) -> None:
    zookeeper_fleet.create(path, data)

    with pytest.raises(ConfigurationError, match=r"is not an ephemeral LeaseRecord: .* lease_url"):
        zookeeper_fleet.instance().beat(names(1))


def settings(folder: Path, **chosen: Any) -> dict[str, Any]:
    """A compensator's settings, with one source."""
    return {
        "broker": {"url": "http://127.0.0.1:1"},
        "compensator": {"sources": [{"url": f"sqlite:///{folder / 'shop.db'}"}], **chosen},
    }


def test_a_compensator_with_a_lease_url_of_zookeeper_shares_its_sources(
    zookeeper_fleet: ZooKeeperFleet, tmp_path: Path
) -> None:
    flags = settings(tmp_path, lease_url=zookeeper_fleet.url)
    parts = [wire(load(flags, file=None), clock=SystemClock()) for _ in range(2)]
    instances = [one.assignment for one in parts]
    try:
        assert all(isinstance(one, LeasedAssignment) for one in instances)
        shares = zookeeper_fleet.settle([one for one in instances if isinstance(one, LeasedAssignment)], names(6))
    finally:
        for one in parts:
            one.assignment.leave()
            one.close()

    assert [len(held) for held in shares] == [3, 3]


def test_no_leases_are_no_leases_wherever_they_would_be(tmp_path: Path) -> None:
    parts = wire(load(settings(tmp_path, lease_url="zookeeper://zk/a", leases=False), file=None), clock=SystemClock())

    assert isinstance(parts.assignment, UnleasedAssignment)
    parts.close()


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ({"lease_url": "zookeeper://"}, "zookeeper://zk1:2181"),
        ({"lease_url": "zookeeper://127.0.0.1:1"}, "zookeeper://zk1:2181"),
        ({"lease_url": "zookeeper://u:p@127.0.0.1/a"}, "options of their own"),
        ({"lease_url": "zookeeper://127.0.0.1/a", "lease_schema": "shop"}, "lease_schema is of leases in a database"),
        ({"lease_url": "zookeeper://127.0.0.1/a", "zookeeper_user": "u"}, "both a user and a password file"),
        ({"zookeeper_tls": True}, "zookeeper_tls is of leases in ZooKeeper"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_cure(chosen: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=error):
        wire(load(settings(tmp_path, **chosen), file=None), clock=SystemClock())
