"""Compensators whose leases are in a ZooKeeper of three servers: its leader dies, and no lease changes hands."""

from __future__ import annotations

from tests.compensator.assignment.fleet import names
from tests.compensator.assignment.zookeeper_fleet import ZooKeeperFleet
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.cluster.conftest import eventually


def test_leases_outlive_the_death_of_zookeepers_leader(cluster: BookKeeperCluster) -> None:
    fleet = ZooKeeperFleet(cluster.zookeeper_hosts)
    one, two = fleet.instance(), fleet.instance()
    sources = names(10)
    before = fleet.settle([one, two], sources)
    instances = {one.instance, two.instance}

    killed = cluster.zookeeper.kill9_leader()
    during = [one.beat(sources), two.beat(sources)]
    after = fleet.settle([one, two], sources)
    cluster.restore()

    print(f"the leader was {killed}")
    assert before == during == after
    assert {one.instance, two.instance} == set(fleet.holders().values()) == instances
    fleet.close()


def test_what_a_dead_instance_held_is_taken_while_another_server_leads(cluster: BookKeeperCluster) -> None:
    fleet = ZooKeeperFleet(cluster.zookeeper_hosts)
    one, two = fleet.instance(), fleet.instance()
    sources = names(10)
    fleet.settle([one, two], sources)

    cluster.zookeeper.kill9_leader()
    fleet.die(one)
    eventually(lambda: len(two.beat(sources)) == len(sources), what="everything with the other instance")
    cluster.restore()

    assert set(fleet.holders().values()) == {two.instance}
    fleet.close()
