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
    BusinessRule,
    CompletenessBound,
    Condition,
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
from tests.fixtures.databases import Database, sqlite_database
from tests.fixtures.local_server import LocalServer
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_reconcile.load.completeness_bound import Reach

HOUR_AGO = CompletenessBound(complete_until_ms=NOW_MS - HOUR_MS)
OPENED, WEATHER, SHIPPED, RETURNED = "order.opened", "weather", "order.shipped", "order.returned"
CURRENT = {OPENED, RETURNED}
WELL = {"stored", "done", "announced"}
RUNNING = {"Slave_IO_Running": "Yes", "Slave_SQL_Running": "Yes", "Seconds_Behind_Master": 7}


@pytest.fixture(scope="module")
def behind(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A run on a database that stands still since an hour ago, but for the rules whose topics are in CURRENT."""
    folder = tmp_path_factory.mktemp("behind")
    world = _standing_still()
    world.orders.pop(0)
    world.inbox.pop(1)
    world.order(age_ms=20 * MINUTE_MS, status=OPENED)
    world.store("weather-1", key=str(world.orders[0]["id"]), topic=WEATHER, age_ms=20 * MINUTE_MS)
    for topic in (SHIPPED, RETURNED):
        for age_ms in (2 * HOUR_MS, 20 * MINUTE_MS):
            world.order(age_ms=age_ms, status=topic)
            world.store(world.sent(f"{topic}-{age_ms}", key=topic, age_ms=age_ms, topic=topic), key=topic,
                        age_ms=age_ms, topic=topic)  # fmt: skip
        world.orders.pop()
    settings = world.write(sqlite_database(folder), folder)
    rules = [
        BusinessRule(
            name=topic, table="orders", key_column=key, time_column="paid_at_us", topic=topic,
            where=[Condition(column="status", values=(topic,))],
            until=CompletenessBound(lag_seconds=0) if topic in CURRENT else CompletenessBound(),
        )
        for topic, key in ((OPENED, "id"), (SHIPPED, "status"), (RETURNED, "status"))
    ]  # fmt: skip
    return run(replace(settings, until=HOUR_AGO, rules=[*settings.rules, *rules]), session=spark, now_ms=NOW_MS)


@pytest.mark.spark
def test_what_a_database_that_stands_still_has_not_got_is_not_lost_and_what_it_should_have_got_is_judged_as_ever(
    behind: Summary,
) -> None:
    assert _rules(behind, PAID) == {
        "business_replica_behind": 3, "inbox_replica_behind": 3, "no_business_row": 1, "acknowledged_not_handled": 1,
    }  # fmt: skip
    assert behind.sentence == "Not balanced: 1 lost, 1 phantom, 1 duplicate."


def test_a_lag_is_the_time_until_which_a_source_was_complete(sqlite: Database, tmp_path: Path) -> None:
    settings = _standing_still().write(sqlite, tmp_path)

    told, by_lag = (
        reach_of(replace(settings, until=until), now_ms=NOW_MS)
        for until in (HOUR_AGO, CompletenessBound(lag_seconds=3600))
    )

    assert told == by_lag
    assert _all(told) == {NOW_MS - HOUR_MS}


@pytest.mark.spark
def test_each_source_has_a_reach_of_its_own(behind: Summary) -> None:
    assert _rules(behind, OPENED) == {"message_replica_behind": 1}
    assert _rules(behind, WEATHER) == {"outbox_replica_behind": 1}


@pytest.mark.spark
def test_a_second_message_under_a_key_waits_for_the_row_that_the_replica_has_not_got_yet(behind: Summary) -> None:
    assert _rules(behind, SHIPPED).keys() == {"row_replica_behind"}
    assert _rules(behind, RETURNED).keys() == {"published_twice"}


@pytest.mark.spark
def test_an_hour_that_a_source_does_not_reach_stays_open_until_it_does_and_a_row_without_a_time_finds_its_message(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world, behind = _world(20), _world(20)
    for one in (world, behind):
        one.orders[0]["paid_at_us"] = None
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
    assert (second.business_rows, second.messages) == (23, 23)


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


def _rules(summary: Summary, topic: str | None = None) -> dict[str, int]:
    """The counts of rules that are not plain: of one topic, or of all."""
    found = Counter[str]()
    for one in summary.verdict_counts:
        if one.rule not in WELL and not one.echo and topic in {None, one.topic}:
            found[one.rule] += one.count
    return dict(found)


def _all(reach: Reach) -> set[int]:
    return {reach.archive_ms, *reach.business.values(), *reach.inboxes.values()}
