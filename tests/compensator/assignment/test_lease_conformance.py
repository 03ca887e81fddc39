"""Instances that share sources by leases, wherever the leases are kept: one suite for tables and for ZooKeeper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from outbox_core.assignment.even_assignment import Resource
from tests.compensator.assignment.fleet import Fleet, names
from tests.compensator.assignment.zookeeper_fleet import ZooKeeperFleet
from tests.fixtures.servers import MYSQL_LIKE, ReadyDatabase
from tests.outbox.shop import make_tables, open_shop

ROUNDS_MAX = 1_000
SLOT = "mysql://host:3306/db?zone=a#timers-0"
AnyFleet = Fleet | ZooKeeperFleet


@pytest.fixture(params=["sqlite", *MYSQL_LIKE, "zookeeper"])
def any_fleet(request: pytest.FixtureRequest, ready_database: ReadyDatabase) -> Iterator[AnyFleet]:
    """Instances on each store of leases."""
    if request.param == "zookeeper":
        made = ZooKeeperFleet(request.getfixturevalue("running_zookeeper").hosts)
        yield made
        made.close()
        return
    with ready_database(request.param, make_tables) as database, open_shop(database, has_tables=True) as shop:
        fleet = Fleet(shop)
        yield fleet
        fleet.close()


def everything(found: list[frozenset[str]]) -> list[str]:
    """All that instances have, sorted: equal to the sources' names when nothing is missing and nothing is doubled."""
    return sorted(name for one in found for name in one)


def test_a_lone_instance_has_all_at_its_first_beat(any_fleet: AnyFleet) -> None:
    one = any_fleet.instance(zone="b")
    sources = [*names(3, zone="a"), *names(3, zone="b", prefix="other"), Resource(SLOT), Resource(".")]

    held = one.beat(sources)

    assert held == {source.name for source in sources}
    assert any_fleet.holders() == dict.fromkeys(held, one.instance)


def test_who_joins_is_given_its_share_without_a_gap(any_fleet: AnyFleet) -> None:
    one, two = any_fleet.instance(), any_fleet.instance()
    sources = names(10)
    held = {one: one.beat(sources), two: two.beat(sources)}
    joined = held[two]

    for beating in [one, two] * 20:
        held[beating] = beating.beat(sources)
        assert held[one] | held[two] == {source.name for source in sources}, "a source was without an instance"
    shares = any_fleet.settle([one, two], sources)

    assert joined == frozenset()
    assert [len(share) for share in shares] == [5, 5]
    assert Counter(any_fleet.holders().values()) == {one.instance: 5, two.instance: 5}


def test_who_leaves_gives_everything_up_at_once_and_takes_nothing_of_others(any_fleet: AnyFleet) -> None:
    one, two = any_fleet.instance(), any_fleet.instance()
    sources = names(10)
    any_fleet.settle([one, two], sources)

    one.leave()
    one.leave()

    assert one.beat(sources) == frozenset()
    assert set(any_fleet.holders().values()) == {two.instance}
    assert len(any_fleet.settle([two], sources)[0]) == 10


def test_a_source_that_is_configured_no_more_is_given_up(any_fleet: AnyFleet) -> None:
    one = any_fleet.instance()
    one.beat(names(3))

    assert one.beat(names(2)) == {"source-0000", "source-0001"}
    for _ in range(ROUNDS_MAX):  # ZooKeeper tells a session of its own release a moment later
        one.beat(names(2))
        if len(any_fleet.holders()) == 2:
            break
    assert set(any_fleet.holders()) == {"source-0000", "source-0001"}
    assert one.beat(names(3)) == {source.name for source in names(3)}


def test_what_a_dead_one_held_is_taken_by_the_others_which_keep_what_they_have(any_fleet: AnyFleet) -> None:
    one, two, three = (any_fleet.instance() for _ in range(3))
    sources = names(9)
    before = any_fleet.settle([one, two, three], sources)

    any_fleet.die(one)
    after = any_fleet.settle([two, three], sources)
    again = any_fleet.settle([one, two, three], sources)

    assert [len(held) for held in before] == [len(held) for held in again] == [3, 3, 3]
    assert everything(after) == everything(again) == [source.name for source in sources]
    assert before[1] < after[0]
    assert before[2] < after[1]
    assert one.failed_beats == 0


def test_sources_of_a_zone_go_to_instances_of_that_zone_and_to_others_while_there_is_none(
    any_fleet: AnyFleet,
) -> None:
    of_a, of_b, nowhere = any_fleet.instance(zone="a"), any_fleet.instance(zone="b"), any_fleet.instance()
    sources = [*names(4, zone="a", prefix="a"), *names(4, zone="b", prefix="b"), *names(4, prefix="any")]

    settled = any_fleet.settle([of_a, of_b, nowhere], sources)
    any_fleet.die(of_b)
    without_b = any_fleet.settle([of_a, nowhere], sources)
    again = any_fleet.settle([of_a, any_fleet.instance(zone="b"), nowhere], sources)

    assert all(name.startswith("a-") for name in settled[0])
    assert all(name.startswith("b-") for name in settled[1])
    assert [len(held) for held in settled] == [4, 4, 4]
    assert everything(without_b) == sorted(source.name for source in sources)
    assert [len(held) for held in without_b] == [6, 6]
    assert {name for name in again[1] if name.startswith("b-")} == {source.name for source in sources[4:8]}


def test_a_source_that_no_other_knows_stays_served(any_fleet: AnyFleet) -> None:
    old, new = any_fleet.instance(), any_fleet.instance()
    known, more = names(4), names(8)
    shares: list[frozenset[str]] = []

    for _ in range(ROUNDS_MAX):
        shares = [old.beat(known), new.beat(more)]
        if len(shares[0]) + len(shares[1]) == 8:
            break

    assert everything(shares) == [source.name for source in more]
    assert any_fleet.holders()["source-0007"] == new.instance
    new.leave()
    assert any_fleet.settle([old], known) == [frozenset(source.name for source in known)]
