"""Instances that share sources by leases in tables: rows, epochs, fights, outages. On real databases."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, text, update

from compensator.assignment import LeaseOptions, UnleasedAssignment, open_assignment
from compensator.assignment.lease_registry import END_NEVER
from outbox_core.assignment.even_assignment import Resource
from outbox_core.common.errors import ConfigurationError, SchemaMissing
from outbox_core.runtime.logs import event_name
from tests.compensator.assignment.fleet import LONG, Fleet, names
from tests.fixtures.forks import FORKS
from tests.fixtures.local_server import LocalServer
from tests.outbox.shop import Shop, open_shop

WAIT_SECONDS = 300


def everything(found: list[frozenset[str]]) -> list[str]:
    """All that instances have, sorted: equal to the sources' names when nothing is missing and nothing is doubled."""
    return sorted(name for one in found for name in one)


def test_without_leases_all_sources_are_this_instances() -> None:
    mine = UnleasedAssignment()

    assert mine.beat(names(3)) == {"source-0000", "source-0001", "source-0002"}
    mine.leave()


def test_a_lease_has_no_end_and_the_row_of_an_instance_its_zone(fleet: Fleet) -> None:
    one = fleet.instance(zone="a")

    one.beat(names(3))

    assert all((row["until_us"], row["epoch"]) == (END_NEVER, 1) for row in fleet.leases().values())
    [row] = fleet.instances().values()
    assert row["zone"] == "a"
    assert row["alive_until_us"] - row["started_at_us"] == LONG.lease_ms * 1000
    one.leave()
    assert fleet.instances() == {}


def test_who_joins_is_given_its_share_without_a_gap_and_each_change_of_hands_counts_an_epoch(fleet: Fleet) -> None:
    one, two = fleet.instance(), fleet.instance()
    sources = names(10)
    one.beat(sources)

    joined = two.beat(sources)
    offering = one.beat(sources)
    took = two.beat(sources)
    left_with = one.beat(sources)

    assert (len(joined), len(offering), len(took), len(left_with)) == (0, 10, 5, 5)
    assert everything([took, left_with]) == [source.name for source in sources]
    assert Counter(row["epoch"] for row in fleet.leases().values()) == {1: 5, 2: 5}
    assert {row["until_us"] for row in fleet.leases().values()} == {END_NEVER}


def test_one_that_was_thought_dead_lives_on_with_what_is_left(fleet: Fleet) -> None:
    one, two = fleet.instance(), fleet.instance()
    sources = names(10)
    fleet.settle([one, two], sources)
    fleet.die(one)
    two.beat(sources)

    paused = one.beat(sources)
    found = fleet.settle([one, two], sources)

    assert paused == frozenset()
    assert [len(held) for held in found] == [5, 5]
    assert everything(found) == [source.name for source in sources]


def test_nobody_takes_from_one_that_came_back_just_before(mysql_fleet: Fleet) -> None:
    one, two = mysql_fleet.instance(), mysql_fleet.instance()
    one.beat(names(3))
    two.beat(names(3))
    mysql_fleet.die(one)
    came_back = threading.Event()

    def come_back(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "epoch" in statement and not came_back.is_set():
            came_back.set()
            with mysql_fleet.shop.engine.begin() as connection:
                connection.execute(update(mysql_fleet.shop.tables.instance).values(alive_until_us=END_NEVER))

    event.listen(mysql_fleet.engine_of(1), "before_cursor_execute", come_back)

    assert two.beat(names(3)) == frozenset()
    assert came_back.is_set()
    assert len(one.beat(names(3))) == 3


def test_two_that_fight_for_the_same_sources_never_both_win_one(mysql_fleet: Fleet) -> None:
    sources = names(200)
    ready = threading.Barrier(4)
    instances = [mysql_fleet.instance() for _ in range(4)]
    found: dict[int, frozenset[str]] = {}

    def fight(number: int) -> None:
        ready.wait(WAIT_SECONDS)
        found[number] = instances[number].beat(sources)

    threads = [threading.Thread(target=fight, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)

    assert len(found) == 4
    assert len(everything(list(found.values()))) == len(set(everything(list(found.values()))))
    assert all(row["epoch"] <= 1 for row in mysql_fleet.leases().values())
    assert [len(held) for held in mysql_fleet.settle(instances, sources, beats=6)] == [50] * 4


def test_many_fights_for_one_lease_are_won_once_each(fleet: Fleet) -> None:
    store = fleet.store()
    with fleet.shop.engine.begin() as connection:
        store.add(connection, ["the one"])
    ready = threading.Barrier(2)
    won: list[int] = []

    def fight(name: str) -> None:
        ready.wait(WAIT_SECONDS)
        with fleet.shop.engine.begin() as connection:
            won.append(store.take(connection, ["the one"], instance=name))

    with fleet.shop.engine.begin() as connection:
        for name in ("x", "y"):
            store.join(connection, name, zone=None, lease_us=600_000_000)
    for _ in range(10):
        threads = [threading.Thread(target=fight, args=(name,)) for name in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        fleet.shop.execute(f"UPDATE {fleet.shop.tables.lease.fullname} SET until_us = 1")

    assert won.count(1) == won.count(0) == 10
    assert fleet.leases()["the one"]["epoch"] == 10


def test_a_source_that_was_given_up_comes_back_with_another_epoch(fleet: Fleet) -> None:
    one = fleet.instance()
    for count in (3, 2, 3):
        one.beat(names(count))

    assert fleet.leases()["source-0002"]["epoch"] == 2


def test_instances_that_died_long_ago_are_forgotten(fleet: Fleet) -> None:
    one, dead = fleet.instance(), fleet.instance()
    dead.beat(names(1))
    fleet.die(dead)

    one.beat(names(1))

    assert list(fleet.instances()) == [one.instance]


def test_instances_that_died_just_now_are_kept_for_people_to_see(fleet: Fleet) -> None:
    one, dead = fleet.instance(), fleet.instance()
    dead.beat(names(1))
    expire = f"UPDATE {fleet.shop.tables.instance.fullname} SET alive_until_us = started_at_us"
    fleet.shop.execute(expire)

    one.beat(names(1))

    assert set(fleet.instances()) == {one.instance, dead.instance}
    assert fleet.leases()["source-0000"]["instance"] == one.instance


@pytest.mark.parametrize("at_statement", range(1, 9))
def test_a_connection_lost_at_any_statement_costs_a_beat_and_nothing_else(
    mysql_fleet: Fleet, at_statement: int
) -> None:
    one, two = mysql_fleet.instance(), mysql_fleet.instance()
    mysql_fleet.settle([one, two], names(6))
    dropped = {"source": "dropped", "instance": two.instance, "until_us": END_NEVER, "epoch": 1}
    with mysql_fleet.shop.engine.begin() as connection:
        connection.execute(insert(mysql_fleet.shop.tables.lease).values(**dropped))
    mysql_fleet.die(one)
    statements: list[str] = []

    def cut(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement.partition(" ")[0])
        if len(statements) == at_statement:
            mysql_fleet.shop.execute(f"KILL {cursor.connection.thread_id()}")

    event.listen(mysql_fleet.engine_of(1), "before_cursor_execute", cut)

    two.beat(names(8))
    failed = two.failed_beats
    found = mysql_fleet.settle([one, two], names(8))

    whole_beat = ["UPDATE", "SELECT", "SELECT", "UPDATE", "INSERT", "UPDATE", "DELETE"]
    assert failed == (1 if at_statement <= len(whole_beat) else 0)
    assert statements[: min(at_statement, 7)] == whole_beat[:at_statement]
    assert [len(held) for held in found] == [4, 4]
    assert everything(found) == [source.name for source in names(8)]


def test_who_joined_by_a_commit_whose_answer_was_lost_gives_everything_up_when_it_leaves(fleet: Fleet) -> None:
    one = fleet.instance()

    def commit_and_lose_the_answer(connection: Connection) -> None:
        raw: Any = connection.connection.driver_connection
        raw.commit()
        raw.close()

    event.listen(fleet.engine_of(0), "commit", commit_and_lose_the_answer, once=True)
    first = one.beat(names(3))
    failed, joined = one.failed_beats, list(fleet.instances())
    second = one.beat(names(3))
    one.leave()

    assert (first, failed, joined) == (frozenset(), 1, [one.instance])
    assert len(second) == 3
    assert fleet.instances() == {}
    assert {row["instance"] for row in fleet.leases().values()} == {None}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events of the assignment; a thread that another test has left may log as well."""
    return [event_name(record) for record in caplog.records if record.name.startswith("compensator.assignment")]


def test_what_is_held_stays_held_while_the_lease_database_is_out(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    one = fleet.instance()
    sources = names(3)
    before = one.beat(sources)
    lease = fleet.shop.tables.lease
    fleet.shop.execute(f"ALTER TABLE {lease.fullname} RENAME TO {lease.fullname}_away")

    with caplog.at_level(logging.WARNING):
        out = [one.beat(sources), one.beat(sources[:2])]
    failed = one.failed_beats
    fleet.shop.execute(f"ALTER TABLE {lease.fullname}_away RENAME TO {lease.fullname}")

    assert out == [before, {"source-0000", "source-0001"}]
    assert failed == 2
    assert told(caplog) == ["assignment_beat_failed"] * 2
    assert one.beat(sources) == before
    assert one.failed_beats == 0


def test_a_database_that_is_not_there_gives_nothing_to_begin_with_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = open_assignment("mysql+pymysql://root@127.0.0.1:1/nowhere")

    assert one.beat(names(3)) == frozenset()
    one.leave()

    assert told(caplog) == ["assignment_beat_failed"]


def test_missing_tables_are_said_at_the_first_beat(fleet: Fleet) -> None:
    one = fleet.instance()
    fleet.shop.execute(f"DROP TABLE {fleet.shop.tables.instance.fullname}")

    with pytest.raises(SchemaMissing, match="outbox db upgrade"):
        one.beat(names(1))


def test_leaving_while_the_database_is_out_is_not_an_error(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    one = fleet.instance()
    one.beat(names(2))
    fleet.shop.execute(f"DROP TABLE {fleet.shop.tables.lease.fullname}")

    with caplog.at_level(logging.WARNING):
        one.leave()

    assert told(caplog) == ["assignment_leave_failed"]


@pytest.mark.parametrize("fork", FORKS)
def test_a_fresh_process_is_an_instance_of_its_own_after_a_fork(fleet: Fleet, fork: Callable[[], int]) -> None:
    one = fleet.instance()
    one.beat(names(4))
    reading, writing = os.pipe()

    connections: list[int] = []
    event.listen(fleet.engine_of(0), "connect", lambda *_: connections.append(1))

    child = fork()
    if child == 0:
        answer = f"{one.instance} {sorted(one.beat(names(4)))} on {len(connections)} new connection"
        os.write(writing, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()

    assert answer.endswith(" [] on 1 new connection")
    assert answer[:32] != one.instance
    assert set(fleet.instances()) == {one.instance, answer[:32]}
    assert len(one.beat(names(4))) == 4


@pytest.mark.slow
def test_an_open_transaction_of_somebody_else_delays_a_beat_by_a_bound_and_drops_nothing(
    mysql_fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    options = LeaseOptions(beat_ms=500, lease_ms=2_000)
    one = mysql_fleet.instance(options=options)
    before = one.beat(names(3))
    lease, instance = mysql_fleet.shop.tables.lease.fullname, mysql_fleet.shop.tables.instance.fullname

    with mysql_fleet.shop.engine.begin() as connection:
        connection.execute(text(f"UPDATE {instance} SET zone = 'held'"))
        connection.execute(text(f"UPDATE {lease} SET epoch = 7"))
        held = one.beat(names(3))
        connection.rollback()

    assert held == before
    assert one.failed_beats == 1
    [failed] = [record for record in caplog.records if event_name(record) == "assignment_beat_failed"]
    assert "Lock wait timeout" in failed.error


def test_wrong_options_and_names_are_refused() -> None:
    for wrong in (
        lambda: LeaseOptions(beat_ms=4_000, lease_ms=6_000),
        lambda: LeaseOptions(forget_after_ms=1),
        lambda: Resource(""),
        lambda: Resource("x" * 256),
        lambda: Resource("übung"),
        lambda: Resource("x", zone="z" * 65),
        lambda: open_assignment("no url"),
        lambda: open_assignment("sqlite:///x.db", zone=""),
    ):
        with pytest.raises(ConfigurationError):
            wrong()


def test_whatever_comes_and_goes_all_is_served_and_level_in_the_end(sqlite_fleet: Fleet, random_seed: int) -> None:
    random = Random(random_seed)
    sources = [*names(13), *names(7, zone="a", prefix="a"), *names(5, zone="b", prefix="b")]
    live = [sqlite_fleet.instance(zone=None)]
    zones: dict[str, str | None] = {live[0].instance: None}
    for _ in range(60):
        match random.choice(["join", "leave", "die", "beat", "beat", "beat", "beat"]):
            case "join" if len(live) < 5:
                zone = random.choice([None, "a", "b"])
                live.append(sqlite_fleet.instance(zone=zone))
                zones[live[-1].instance] = zone
            case "leave" if len(live) > 1:
                live.pop(random.randrange(len(live))).leave()
            case "die" if len(live) > 1:
                sqlite_fleet.die(live.pop(random.randrange(len(live))))
            case _:
                random.choice(live).beat(sources)

    found = sqlite_fleet.settle(live, sources, beats=6)

    assert everything(found) == sorted(source.name for source in sources)
    rows = sqlite_fleet.leases()
    assert all(row["until_us"] == END_NEVER for row in rows.values())
    for prefix in ("a", "b"):
        zoned = [one for one in live if zones[one.instance] == prefix]
        holders = {row["instance"] for name, row in rows.items() if name.startswith(f"{prefix}-")}
        assert not zoned or holders <= {one.instance for one in zoned}


def test_the_bound_on_sources_is_named(sqlite_shop: Shop) -> None:
    one = Fleet(sqlite_shop).instance()

    with pytest.raises(ConfigurationError, match="10,000"):
        one.beat([Resource(str(number)) for number in range(10_001)])


def test_a_step_of_the_databases_clock_leaves_every_source_with_somebody(fleet: Fleet) -> None:
    instances = [fleet.instance() for _ in range(3)]
    sources = names(9)
    now = fleet.settle(instances, sources)
    fleet.shop.execute(f"UPDATE {fleet.shop.tables.instance.fullname} SET alive_until_us = 1")

    for _ in range(3):
        for number, one in enumerate(instances):
            now[number] = one.beat(sources)
            assert len(set().union(*now)) == 9

    assert [len(held) for held in now] == [3, 3, 3]
    assert everything(now) == [source.name for source in sources]


def test_a_lease_database_that_is_killed_and_comes_back_changes_nothing(mysql_like_server: LocalServer) -> None:
    with mysql_like_server.fresh_database() as database, open_shop(database) as shop:
        fleet = Fleet(shop)
        instances = [fleet.instance() for _ in range(2)]
        before = fleet.settle(instances, names(6))

        mysql_like_server.kill9()
        out = [one.beat(names(6)) for one in instances]
        failed = [one.failed_beats for one in instances]
        mysql_like_server.restart()
        after = [one.beat(names(6)) for one in instances]
        fleet.close()

    assert before == out == after
    assert failed == [1, 1]
    assert [one.failed_beats for one in instances] == [0, 0]
