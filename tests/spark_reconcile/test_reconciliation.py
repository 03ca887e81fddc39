"""Whole runs on made-up worlds: every planted fault is found at its id, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from spark_reconcile import InboxSource, Settings, State, Summary, run
from spark_reconcile.classify.classification import RULES
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.sources.dbapi_reader import DbApiReader
from tests.fixtures.databases import Database
from tests.outbox_broker.action_log import action_segments
from tests.spark_reconcile.faults import Planted, Verdict, plant_all
from tests.spark_reconcile.other_worlds import LIMITS, OTHERS, PICKED, REFUND, REFUNDS, SECRET, write_refunds
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, PAID, REMINDER, SECOND_MS, TICKETS, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

_PLAIN = {"stored", "done", "announced"}
_ELSEWHERE = re.compile(
    r'"(\w+_out_of_reach|\w+_replica_behind|message_unknown|filtered_out|filter_changed|filtered_out_or_waiting'
    r"|group_deleted|handled_twice|no_key|too_few_messages|archived_twice|impossible_time|key_spelling_differs"
    r'|message_key_spelling_differs|held_by_delay_cluster)"'
)
"""Rules whose records are of worlds of their own: each is expected by name in one of the tests here."""
DATABASE_TIMES = {"paid_at_us", "due_at_us", "created_at_us", "sent_at_us", "handled_at_us"}


# -- one of every fault, and every other world beside it -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionRun:
    """A run over the planted faults and every world of OTHERS at once, and the verdicts in it that are not plain."""

    summary: Summary
    faults: set[Verdict]
    others: set[Verdict]
    seed: int


@pytest.fixture(scope="module")
def alone(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Summary]:
    """A run over the planted faults and few balanced messages, with nothing beside them."""
    folder = tmp_path_factory.mktemp("alone")
    world = _world(balanced=5)
    plant_all(world)
    settings = world.write(_sqlite(folder), folder)
    return settings, run(settings, session=spark, now_ms=NOW_MS)


@pytest.fixture(scope="module")
def union(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> UnionRun:
    """The same faults among more messages, worlds of other tests beside them, all rows in another order, and evidence
    in as many partitions as that of many rows.
    """
    folder = tmp_path_factory.mktemp("union")
    world = _world(balanced=5)
    faults, others = plant_all(world), Planted(world)
    for plant in OTHERS:
        plant(others)
    for number in range(45):
        world.settled(age_ms=HOUR_MS - number * MINUTE_MS // 2)
    elsewhere = World(inbox=[row for row in world.inbox if row["message_id"] == "good-1"])
    seed = int(os.environ.get("OUTBOX_TEST_SEED") or secrets.randbits(32))
    world.shuffle(Random(seed))
    database, other = _sqlite(folder), _sqlite(folder, "other")
    settings = world.write(database, folder, records_a_segment=40)
    elsewhere.write_tables(other)
    write_refunds(database)
    settings = replace(
        settings,
        rules=[*settings.rules, REFUNDS],
        inboxes=[*settings.inboxes, InboxSource(group=TICKETS, url=other.url)],
        limits=RunLimits(one_partition_rows_max=0),
    )
    summary = run(settings, session=spark, now_ms=NOW_MS)
    return UnionRun(summary=summary, faults=faults, others=others.expected, seed=seed)


def test_every_planted_fault_is_found_at_its_id_and_nothing_else_is(
    spark: SparkSession, mysql_like: Database, tmp_path: Path
) -> None:
    world = _world(balanced=50)
    expected = plant_all(world)
    settings = world.write(mysql_like, tmp_path, records_a_segment=40)

    summary = run(settings, session=spark, now_ms=NOW_MS)

    _finds(summary, expected)


def test_every_planted_fault_is_found_beside_those_of_other_worlds(union: UnionRun) -> None:
    print(f"seed: OUTBOX_TEST_SEED={union.seed}")

    _finds(union.summary, union.faults | union.others)


def test_a_world_without_faults_is_balanced(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    settings = _world(balanced=30).write(sqlite, tmp_path)

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert summary.balanced
    assert (summary.business_rows, summary.messages, summary.message_groups) == (30, 30, 60)
    assert (summary.delivered, summary.acknowledged, summary.redelivered) == (60, 60, 0)
    assert summary.count(State.SETTLED) == 120
    assert summary.sentence.startswith("Balanced")
    assert _unsettled(summary) == set()
    handled = [
        (one.topic, one.of, one.count, one.p50_ms) for one in summary.latencies if one.hop == "commit to handler"
    ]
    assert handled == [(PAID, TICKETS, 30, 30)]
    assert _rows(summary, "run_log") == 1


def test_more_balanced_messages_and_another_order_of_rows_change_no_finding(
    alone: tuple[Settings, Summary], union: UnionRun
) -> None:
    print(f"seed: OUTBOX_TEST_SEED={union.seed}")
    _, summary = alone

    found = _unsettled(summary)

    assert found == union.faults
    assert _unsettled(union.summary) == found | union.others
    assert union.summary.messages - summary.messages > 45


def test_a_rerun_gives_identical_tables_and_the_manifest_names_the_newer_and_small_segments_are_read_in_place(
    spark: SparkSession, alone: tuple[Settings, Summary]
) -> None:
    settings, first = alone

    second = run(settings, session=spark, now_ms=NOW_MS)

    for table in ("verdicts", "business_verdicts", "aggregates"):
        assert _sorted_table(first, table) == _sorted_table(second, table)
    manifest = json.loads((settings.output / "manifest.json").read_text())
    assert manifest["newest"] == second.run_id
    assert sorted(path.name for path in settings.output.iterdir()) == sorted(
        [".lock", first.run_id, second.run_id, "manifest.json", "totals.json"]
    ), "no folder of kept segments"


def test_the_summary_adds_up_and_the_report_names_the_findings_and_no_body(union: UnionRun) -> None:
    summary = union.summary

    printed = summary.as_dict()
    written = json.loads((Path(summary.folder) / "run.json").read_text())
    assert written == json.loads(json.dumps(printed))
    assert sum(printed["verdicts"].values()) == summary.messages + summary.message_groups
    assert sum(printed["business_verdicts"].values()) == summary.business_rows
    page = (Path(summary.folder) / "report.html").read_text()
    assert "with-body" in page
    assert len(page.encode()) < 300_000
    for found in (page, json.dumps(printed)):
        assert SECRET not in found


def test_a_business_key_that_is_null_is_named_and_one_that_is_there_twice_asks_for_two_messages(
    union: UnionRun,
) -> None:
    rows = pq.read_table(Path(union.summary.folder) / "business_verdicts").to_pylist()

    found = {(row["message_key"], row["rule"], row["severity"]) for row in rows if row["topic"] == REFUND}

    assert found == {
        (None, "no_key", "finding"), ("7", "too_few_messages", "finding"), ("8", "announced", "ok"),
    }  # fmt: skip


def test_what_the_inbox_turned_away_is_counted(alone: tuple[Settings, Summary], union: UnionRun) -> None:
    _, without = alone

    assert {one for one in _unsettled(union.summary) if one[1] == "again"} == set()
    assert [
        getattr(union.summary, name) - getattr(without, name)
        for name in ("redelivered", "deduplicated_by_inbox", "deduplicated_by_broker")
    ] == [1, 1, 1]


def test_what_a_source_does_not_reach_back_to_or_has_dropped_is_unknown_and_never_lost(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(balanced=3)
    world.store("old-news", key=None, topic="newsletter", age_ms=20 * HOUR_MS)
    world.sent("first", key=str(world.order(status="BOOKED")), topic=REMINDER, age_ms=21 * HOUR_MS)
    sequence = world.store("first", key=str(world.last_order), topic=REMINDER, age_ms=21 * HOUR_MS)
    world.done("first", sequence, MAIL, age_ms=21 * HOUR_MS, topic=REMINDER)
    old = world.settled(age_ms=20 * HOUR_MS)
    world.archive = [row for row in world.archive if row["id"] != old]
    world.inbox = [row for row in world.inbox if row["message_id"] != old]
    world.orders = world.orders[:-1]
    settings = _complete_since(world.write(sqlite, tmp_path, records_a_segment=1), NOW_MS - 2 * HOUR_MS)
    settings = replace(settings, complete_since_ms=NOW_MS - 3 * HOUR_MS)
    for path in action_segments(settings.broker_data)[:4]:
        path.unlink()  # three declarations, and the first hand-out

    summary = run(settings, session=spark, now_ms=NOW_MS)

    assert summary.balanced
    assert _unsettled(summary) == {
        ("message", old, "", "unknown", "business_out_of_reach"),
        ("delivery", old, "tickets", "unknown", "inbox_out_of_reach"),
        ("message", "old-news", "", "unknown", "archive_out_of_reach"),
        ("delivery", "first", MAIL, "unknown", "delivery_out_of_reach"),
    }


def test_two_effects_in_two_inboxes_of_one_group_are_a_duplicate(union: UnionRun) -> None:
    found = {one for one in _unsettled(union.summary) if one[1] == "good-1"}

    assert found == {("delivery", "good-1", TICKETS, "duplicate", "handled_twice")}


def test_every_rule_decides_about_a_record_in_one_of_these_tests() -> None:
    world = _world(balanced=1)
    asserted = {(scope, rule) for scope, _, _, _, rule in plant_all(world)}
    tests = [path for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_verdicts.py"]
    texts = "".join(path.read_text() for path in tests)
    elsewhere = set(_ELSEWHERE.findall(texts))

    missing = {
        (scope, rule.name)
        for scope, rules in RULES.items()
        for rule in rules
        if (scope, rule.name) not in asserted and rule.name not in elsewhere | _PLAIN
    }

    assert missing == set()


def test_what_a_filter_may_have_passed_by_is_not_late(union: UnionRun) -> None:
    found = {one for one in _unsettled(union.summary) if one[2] == "picky" or (one[1] or "").startswith("picked-")}

    assert found == {("delivery", one, "picky", "unknown", "filter_changed") for one in ("picked-2", "picked-3")}


def test_messages_that_retention_dropped_before_a_group_had_settled_them_are_told_beside_the_log(
    union: UnionRun,
) -> None:
    notes = {one.what: one.note for one in union.summary.inputs if one.source == "broker"}

    assert "retention dropped messages that groups had not settled" in notes["action log"]
    assert f"picky those of {PICKED} below 3 (the last at 2027-01-15T05:30:00+00:00)" in notes["action log"]
    assert "retention" not in notes["message log"]


def test_a_cancel_that_comes_after_the_delivery_changes_no_verdict(union: UnionRun) -> None:
    rows = pq.read_table(Path(union.summary.folder) / "verdicts").to_pylist()

    found = {(row["message_id"], row["consumer_group"] or "", row["rule"]) for row in rows}

    done = [("reminded", MAIL), ("done-before-its-cancel", MAIL), ("done-before-its-cancel", TICKETS)]
    assert {one for one in found if one[0] in {"reminded", "done-before-its-cancel"}} == {
        *((message, group, "done") for message, group in done),
        ("reminded", "", "stored"), ("done-before-its-cancel", "", "stored"),
    }  # fmt: skip


def test_a_cancel_for_one_of_two_topics_with_the_same_id_is_noted_and_takes_that_one_back(union: UnionRun) -> None:
    ids = ["on-two-topics", "cancel-on-one"]
    table = pq.read_table(Path(union.summary.folder) / "verdicts", filters=[("message_id", "in", ids)])

    rules = {(row["topic"], row["scope"], row["rule"]) for row in table.to_pylist()}

    assert rules == {
        (REMINDER, "message", "stored"), (REMINDER, "delivery", "not_fired"), (LIMITS, "message", "canceled"),
        ("(cancels)", "message", "cancel_accepted"),
    }  # fmt: skip


def test_what_the_retention_has_purged_is_unknown_and_a_database_clock_an_hour_behind_loses_nothing_on_its_way(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world(balanced=3)
    old = world.settled(age_ms=20 * HOUR_MS)
    gone = world.settled(age_ms=3 * HOUR_MS)
    world.inbox = [row for row in world.inbox if row["message_id"] not in {old, gone}]
    world.unsent("on-its-way", key=str(world.order(age_ms=SECOND_MS)), age_ms=SECOND_MS)
    lost = world.sent("lost", key=str(world.order(age_ms=5 * HOUR_MS)), age_ms=5 * HOUR_MS)
    rows = (*world.orders, *world.outbox, *world.archive, *world.inbox)
    for row in rows:
        row.update({name: value - HOUR_MS * 1000 for name, value in row.items() if name in DATABASE_TIMES and value})
    monkeypatch.setattr(DbApiReader, "now_ms", lambda _: time.time_ns() // 1_000_000 - HOUR_MS)

    summary = run(replace(world.write(sqlite, tmp_path), inbox_days=0.5), session=spark, now_ms=NOW_MS)

    assert {one for one in _unsettled(summary) if one[0] != "business"} == {
        ("message", lost, "", "lost", "not_in_broker"),
        ("message", "on-its-way", "", "pending", "in_grace"),
        ("delivery", old, "tickets", "unknown", "inbox_out_of_reach"),
        ("delivery", gone, "tickets", "lost", "acknowledged_not_handled"),
    }
    (told,) = summary.clock_sentences
    behind = re.search(r"is (3,[56]\d\d) s behind this machine's", told)
    assert behind is not None, told
    assert 3_500 <= int(behind[1].replace(",", "")) <= 3_600, "less what passed between the looks at the two clocks"
    page = (Path(summary.folder) / "report.html").read_text()
    assert f"is {behind[1]} s behind" in page


def _world(*, balanced: int) -> World:
    world = World()
    world.groups()
    for number in range(balanced):
        world.settled(age_ms=2 * HOUR_MS - number * MINUTE_MS)
    return world


def _sqlite(folder: Path, name: str = "business") -> Database:
    return Database(name="sqlite", url=f"sqlite:///{folder / name}.db", schema=None)


# -- then --------------------------------------------------------------------------------------------------------------


def _finds(summary: Summary, expected: set[Verdict]) -> None:
    """These verdicts and none besides, and each row of the table is counted."""
    found = _unsettled(summary)
    assert sorted(found - expected, key=str) == []
    assert sorted(expected - found, key=str) == []
    assert summary.unexplained == 0
    assert not summary.balanced
    assert _rows(summary, "verdicts") == summary.messages + summary.message_groups


def _complete_since(settings: Settings, time_ms: int) -> Settings:
    rules = [replace(rule, complete_since_ms=time_ms) for rule in settings.rules]
    return replace(settings, rules=rules)


def _unsettled(summary: Summary) -> set[Verdict]:
    """Every verdict that is not plainly settled."""
    folder = Path(summary.folder)
    rows = pq.read_table(folder / "verdicts").to_pylist()
    found = {
        (row["scope"], row["message_id"], row["consumer_group"] or "", row["state"], row["rule"])
        for row in rows
        if row["rule"] not in _PLAIN
    }
    business = pq.read_table(folder / "business_verdicts").to_pylist()
    return found | {
        ("business", row["message_key"], row["business_rule"], row["state"], row["rule"])
        for row in business
        if row["rule"] not in _PLAIN
    }


def _rows(summary: Summary, table: str) -> int:
    return int(pq.read_table(Path(summary.folder) / table).num_rows)


def _sorted_table(summary: Summary, table: str) -> list[dict[str, Any]]:
    return sorted(pq.read_table(Path(summary.folder) / table).to_pylist(), key=str)
