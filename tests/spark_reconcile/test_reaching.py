"""Until when a source holds everything: what a replica that is behind has not got yet is neither lost nor a phantom."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import (
    CompletenessBound,
    InboxSource,
    NotComparable,
    OutboxSource,
    Settings,
    Summary,
    run,
    run_windows,
)
from spark_reconcile.load.completeness_bound import lag_ms, reach_of
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database
from tests.fixtures.local_server import LocalServer
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, REMINDER, TICKETS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_reconcile.load.completeness_bound import Reach

HOUR_AGO = CompletenessBound(complete_until_ms=NOW_MS - HOUR_MS)
WELL = {"stored", "done", "announced"}
RUNNING = {"Slave_IO_Running": "Yes", "Slave_SQL_Running": "Yes", "Seconds_Behind_Master": 7}


@pytest.mark.spark
def test_what_a_database_that_stands_still_has_not_got_is_not_lost_and_what_it_should_have_got_is_judged_as_ever(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _standing_still()
    world.orders.pop(0)
    world.inbox.pop(1)
    settings = replace(world.write(sqlite, tmp_path), until=HOUR_AGO)

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert _rules(summary) == {
        "business_replica_behind": 3, "inbox_replica_behind": 3, "no_business_row": 1, "acknowledged_not_handled": 1,
    }  # fmt: skip
    assert summary.sentence == "Not balanced: 1 lost, 1 phantom."


def test_a_lag_is_the_time_until_which_a_source_was_complete(sqlite: Database, tmp_path: Path) -> None:
    settings = _standing_still().write(sqlite, tmp_path)

    told, by_lag = (
        reach_of(replace(settings, until=until), now_ms=NOW_MS)
        for until in (HOUR_AGO, CompletenessBound(lag_seconds=3600))
    )

    assert told == by_lag
    assert _all(told) == {NOW_MS - HOUR_MS}


@pytest.mark.spark
def test_each_source_has_a_reach_of_its_own(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    world = _world(5)
    world.order(age_ms=20 * MINUTE_MS)
    key = str(world.orders[0]["id"])
    world.store("weather-1", key=key, topic="weather", age_ms=20 * MINUTE_MS)
    settings = world.write(sqlite, tmp_path)
    fresh = CompletenessBound(lag_seconds=0)
    settings = replace(
        settings, until=HOUR_AGO, rules=[replace(rule, until=fresh) for rule in settings.rules],
        inboxes=[replace(inbox, until=fresh) for inbox in settings.inboxes],
    )  # fmt: skip

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert summary.balanced
    assert {rule: count for rule, count in _rules(summary).items() if "replica_behind" in rule} == {
        "outbox_replica_behind": 1, "message_replica_behind": 1,
    }  # fmt: skip


@pytest.mark.spark
def test_a_second_message_under_a_key_waits_for_the_row_that_the_replica_has_not_got_yet(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    for key, topic in (("PAID", PAID), ("BOOKED", REMINDER)):
        for age_ms in (2 * HOUR_MS, 20 * MINUTE_MS):
            world.order(age_ms=age_ms, status=key)
            message = world.sent(f"{topic}-{age_ms}", key=key, age_ms=age_ms, topic=topic)
            place = world.store(message, key=key, age_ms=age_ms, topic=topic)
            for group in (TICKETS, MAIL) if topic == PAID else (MAIL,):
                world.done(message, place, group, age_ms=age_ms, topic=topic)
        world.orders.pop()
    settings = world.write(sqlite, tmp_path)
    behind, current = (replace(rule, key_column="status", deliver_at_column=None) for rule in settings.rules)
    settings = replace(settings, rules=[replace(behind, until=HOUR_AGO), replace(current, until=CompletenessBound())])

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert {(one.topic, one.rule) for one in summary.verdict_counts if one.rule not in WELL and not one.echo} == {
        (PAID, "row_replica_behind"), (REMINDER, "published_twice"),
    }  # fmt: skip


@pytest.mark.spark
def test_an_hour_that_a_source_does_not_reach_stays_open_until_it_does(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world, behind = _world(20), _world(20)
    for one in (world, behind):
        for number in range(3):
            one.settled(age_ms=50 * MINUTE_MS + number)
        with_timed_ids(one)
    for rows in (behind.orders, behind.archive, behind.inbox):
        del rows[20:]
    two_hours_ago = CompletenessBound(complete_until_ms=NOW_MS - 2 * HOUR_MS)
    settings = behind.write(sqlite, tmp_path)
    rules = [replace(rule, until=two_hours_ago) for rule in settings.rules]

    first = _by_hours(replace(settings, rules=rules), spark)
    shown = set(WindowStore(settings.output).windows)
    world.write(sqlite, tmp_path)
    second = _by_hours(settings, spark)

    assert max(shown) + HOUR_MS + MINUTE_MS <= NOW_MS - 2 * HOUR_MS
    assert first.windows is not None
    assert (first.balanced, first.windows.not_closed) == (True, 3)
    assert second.windows is not None
    assert second.windows.judged == second.windows.windows - len(shown), "hours that stood are left alone"
    assert (second.balanced, _rules(second)) == (True, {})


@pytest.mark.parametrize(("lag_minutes", "hours"), [(7 * 60, 6), (31, 1)])
def test_a_span_that_a_source_does_not_reach_is_not_comparable(
    sqlite: Database, tmp_path: Path, lag_minutes: int, hours: int
) -> None:
    settings = replace(_world(2).write(sqlite, tmp_path), until=CompletenessBound(lag_seconds=lag_minutes * 60))

    with pytest.raises(NotComparable, match="let the replica come after"):
        run_windows(settings, since_ms=NOW_MS - hours * HOUR_MS, now_ms=NOW_MS)


def test_what_is_told_of_a_source_comes_before_what_is_told_of_all_and_the_least_of_many_counts(
    sqlite: Database, tmp_path: Path
) -> None:
    settings = _world(1).write(sqlite, tmp_path)
    first, second = settings.rules
    other = OutboxSource(url=f"sqlite:///{tmp_path / 'never asked.db'}", until=CompletenessBound(lag_seconds=30))
    settings = replace(
        settings, until=CompletenessBound(lag_seconds=10), outboxes=[other],
        rules=[
            first,
            replace(second, topic=PAID, until=CompletenessBound(lag_seconds=20, complete_until_ms=NOW_MS - 5_000)),
        ],
        inboxes=[InboxSource(group=MAIL, topics=(PAID,), until=CompletenessBound(complete_until_ms=NOW_MS + HOUR_MS))],
    )  # fmt: skip

    reach = reach_of(settings, now_ms=NOW_MS)

    assert (reach.archive_ms, dict(reach.business)) == (NOW_MS - 30_000, {PAID: NOW_MS - 20_000})
    assert dict(reach.inboxes) == {(PAID, MAIL): NOW_MS}
    assert reach.least_ms == NOW_MS - 30_000


def test_a_database_that_follows_none_reaches_until_now(database: Database, tmp_path: Path) -> None:
    settings = _world(1).write(database, tmp_path)

    reach = reach_of(settings, now_ms=NOW_MS)

    assert _all(reach) == {NOW_MS}


@pytest.mark.spark
def test_a_business_row_without_a_time_is_judged_by_the_hour_as_by_a_whole_run(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(5)
    world.orders[0]["paid_at_us"] = None
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)

    by_hours = _by_hours(settings, spark)

    assert (by_hours.business_rows, by_hours.messages, _rules(by_hours)) == (5, 5, {})


def test_a_replica_that_was_stopped_is_refused_unless_it_is_told_until_when_it_is_complete(
    mysql_like_server: LocalServer, tmp_path: Path
) -> None:
    with mysql_like_server.fresh_database() as database:
        settings = _world(1).write(database, tmp_path)
        command = "CHANGE MASTER TO MASTER_HOST" if database.name == "mariadb" else None
        mysql_like_server.execute(f"{command or 'CHANGE REPLICATION SOURCE TO SOURCE_HOST'} = '127.0.0.1'")

        with pytest.raises(NotComparable, match=r"does not follow its source now.*complete_until"):
            reach_of(settings, now_ms=NOW_MS)
        told = reach_of(replace(settings, until=HOUR_AGO), now_ms=NOW_MS)

    assert _all(told) == {NOW_MS - HOUR_MS}


def test_a_read_only_server_that_a_user_may_not_ask_is_refused_with_the_cure(
    mysql_like_server: LocalServer, tmp_path: Path
) -> None:
    with mysql_like_server.fresh_database() as database:
        settings = _world(1).write(database, tmp_path)
        mysql_like_server.execute(
            "CREATE USER reader@'%' IDENTIFIED BY 'word'", "GRANT SELECT ON *.* TO reader@'%'",
        )  # fmt: skip
        place = database.url.partition("@")[2]
        settings = replace(settings, database_url=f"mysql+pymysql://reader:word@{place}")
        writable = reach_of(settings, now_ms=NOW_MS)

        mysql_like_server.execute("SET GLOBAL read_only = 1")
        with contextlib.ExitStack() as stack:
            stack.callback(mysql_like_server.execute, "SET GLOBAL read_only = 0")
            with pytest.raises(ConfigurationError, match=r"GRANT REPLICATION CLIENT.*lag_seconds"):
                reach_of(settings, now_ms=NOW_MS)

    assert _all(writable) == {NOW_MS}


@pytest.mark.parametrize(
    ("status", "expected_ms"),
    [
        ([], 0),
        ([RUNNING], 8_000),
        ([RUNNING, {**RUNNING, "Seconds_Behind_Master": 60}], 61_000),
        ([{"Replica_IO_Running": "Yes", "Replica_SQL_Running": "Yes", "Seconds_Behind_Source": 0}], 1_000),
    ],
)
def test_a_replica_is_as_far_behind_as_the_last_of_those_it_follows(
    status: list[dict[str, Any]], expected_ms: int
) -> None:
    assert lag_ms(status, name="db:3306") == expected_ms


@pytest.mark.parametrize(
    "change", [{"Seconds_Behind_Master": None}, {"Slave_IO_Running": "Connecting"}, {"Slave_SQL_Running": "No"}]
)
def test_a_replica_with_a_stopped_thread_does_not_say_how_far_it_is(change: dict[str, Any]) -> None:
    with pytest.raises(NotComparable, match="db:3306 is a replica"):
        lag_ms([RUNNING, {**RUNNING, **change}], name="db:3306")


def _world(balanced: int) -> World:
    world = World()
    world.groups()
    for number in range(balanced):
        world.settled(age_ms=4 * HOUR_MS + number * 1000)
    return world


def _standing_still() -> World:
    """Three messages of which the database, as it stood an hour ago, knows nothing."""
    world = _world(5)
    rows = (world.orders, world.archive, world.inbox)
    for number in range(3):
        world.settled(age_ms=20 * MINUTE_MS + number)
    for one in rows:
        del one[5:]
    return world


def _by_hours(settings: Settings, spark: SparkSession) -> Summary:
    return run_windows(
        settings, since_ms=NOW_MS - 6 * HOUR_MS, now_ms=NOW_MS, session=spark, pause=lambda _seconds: None
    )


def _rules(summary: Summary) -> dict[str, int]:
    found = Counter[str]()
    for one in summary.verdict_counts:
        if one.rule not in WELL and not one.echo:
            found[one.rule] += one.count
    return dict(found)


def _all(reach: Reach) -> set[int]:
    return {reach.archive_ms, *reach.business.values(), *reach.inboxes.values()}
