"""Runs by the hour: the same verdicts as a whole run, only for what is new, changed or moving, and twice looked at."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import (
    InboxSource,
    Settings,
    Summary,
    run,
    run_windows,
)
from spark_reconcile.compare import drill_down
from spark_reconcile.compare.key_digests import unsettled
from spark_reconcile.core.plausible_times import EARLIEST_MS
from spark_reconcile.core.settings import RunLimits
from spark_reconcile.results.window_store import Window, WindowStore, closed_windows, newest_closed
from spark_reconcile.results.window_totals import Tally, findings_of, published_topics
from spark_reconcile.rules.verdict_rule import Scope
from spark_reconcile.runs.stored_results import stored_hours
from spark_reconcile.sources.dbapi_reader import DbApiReader
from tests.fixtures.databases import Database, sqlite_database
from tests.spark_reconcile.faults import Verdict
from tests.spark_reconcile.other_worlds import (
    ASTRAY,
    BOTH_RULES,
    CENTURIES_MS,
    KEYLESS,
    WITHOUT_KEY,
    Everything,
    done,
    everything,
    two_rules_more,
    without_keys,
    write_everything,
)
from tests.spark_reconcile.timed_ids import timed_id, with_timed_ids
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    REMINDER,
    TICKETS,
    World,
    append,
    no_wait,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAIN = {"stored", "done", "announced"}
SINCE_MS = NOW_MS - 5 * HOUR_MS
BEGAN_MS = NOW_MS - 8 * HOUR_MS
"""Before every message of the world that has every plant."""
LATEST = NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS
"""The last hour that is over."""
SETTLED = 20
"""How many orders come first for which all is well, where runs follow one another."""


# -- a whole run and one by the hour ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A whole run and one by the hour over the same records, among them every fault. That by the hour was killed twice
    before, once between two tables of verdicts, and once before its index was replaced.
    """

    settings: Settings
    planted: Everything
    whole: Summary
    hourly: Summary


@pytest.fixture(scope="module")
def compared(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    folder = tmp_path_factory.mktemp("compared")
    planted = everything(timed=True)
    settings = write_everything(planted.world, folder)
    for write in ("write business_verdicts", "show index"):
        with pytest.raises(Killed):
            _run(settings, spark, since_ms=BEGAN_MS, checkpoint=_kill_at_write(write))
        assert not WindowStore(settings.output).windows
    return Compared(
        settings=settings,
        planted=planted,
        whole=run(replace(settings, output=folder / "whole"), session=spark, now_ms=NOW_MS),
        hourly=_run(settings, spark, since_ms=BEGAN_MS),
    )


@pytest.mark.spark
def test_every_plant_gets_its_verdict_in_a_whole_run_and_the_same_by_the_hour_though_that_was_killed_twice(
    compared: Compared,
) -> None:
    settings, whole, summary = compared.settings, compared.whole, compared.hourly
    expected, of_no_hour = compared.planted.expected, compared.planted.of_no_hour

    _same(_rows_of_run(whole), expected | of_no_hour)
    _same(_rows_of_windows(settings), expected - _rows_of_open_hours(whole))
    assert _books(summary) == _books_of_tables(whole)
    assert summary.unexplained == 0
    assert {(one.topic, one.p50_ms) for one in summary.latencies if one.hop == "commit to broker"} == {
        (one.topic, 10) for one in compared.planted.world.stored
    }
    again = stored_hours(settings.output, since_ms=BEGAN_MS, until_ms=NOW_MS)
    assert (again.latencies, again.windows and again.windows.untimed) == (summary.latencies, 0)
    assert summary.windows is not None
    assert summary.windows.looked_at < summary.messages + summary.message_groups - 60, "nothing was settled in bulk"


@pytest.mark.spark
def test_a_message_whose_id_has_the_time_of_a_wrong_clock_is_lost_in_the_hour_of_its_row(compared: Compared) -> None:
    assert ("message", ASTRAY, "", "lost", "not_in_broker") in _rows_of_windows(compared.settings)


@pytest.mark.spark
def test_rules_on_one_topic_and_key_ask_for_a_message_each(compared: Compared) -> None:
    found, of_the_run = (
        {row for row in rows if row[1] in BOTH_RULES}
        for rows in (_rows_of_windows(compared.settings), _rows_of_run(compared.whole))
    )

    assert found == of_the_run
    assert found == {
        ("business", key, rule, state, verdict)
        for rule in ("paid orders are announced", "second")
        for key, verdict, state in (
            ("902", "published_twice", "duplicate"), ("903", "too_few_messages", "lost"),
        )
    }  # fmt: skip
    assert sum(one.count for one in compared.hourly.verdict_counts if one.of == "second") == 3


@pytest.mark.spark
def test_rows_without_a_key_are_one_verdict_an_hour(compared: Compared) -> None:
    of_the_run = pq.read_table(Path(compared.whole.folder) / "business_verdicts").to_pylist()

    for rows in (of_the_run, _tables(compared.settings, "business_verdicts")):
        assert _without_key(rows) == WITHOUT_KEY


@pytest.mark.spark
@pytest.mark.slow
def test_messages_whose_ids_have_no_time_get_the_verdicts_of_those_whose_ids_have_one(
    spark: SparkSession, sqlite: Database, tmp_path: Path, compared: Compared
) -> None:
    world = everything(timed=False).world
    timed = dict(zip(_ids(world), _ids(compared.planted.world), strict=True))
    settings = write_everything(world, tmp_path)

    summary = _run(settings, spark, since_ms=BEGAN_MS)

    found = {(scope, timed.get(one, one), *rest) for scope, one, *rest in _rows_of_windows(settings)}
    _same(found, _rows_of_windows(compared.settings))
    assert _books(summary) == _books(compared.hourly)


# -- one run after the other -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A run of several, and what its windows showed behind it."""

    summary: Summary
    versions: dict[int, str]
    rows: set[tuple[Any, ...]]
    business: list[dict[str, Any]]

    def changed_since(self, earlier: Step) -> list[int]:
        """How many hours before the latest one the windows lie that were judged again, the oldest first."""
        changed = sorted(start for start, version in self.versions.items() if version != earlier.versions[start])
        return [(LATEST - start) // HOUR_MS for start in changed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Runs by the hour on records that change in between. What changed is said at each."""

    first: Step
    unchanged: Step
    late: Step
    """The hour of three hours ago got an order with its message, an order without one and a row without a key, and a
    message of the hour before it was acknowledged by the group that it waited for; the key with two messages got one
    more, in the hour of the second.
    """
    changed: Step
    """A message was parked, a due time was moved, an order came for a message that nobody had asked for, and two
    messages for orders of an hour that nothing else changed in.
    """
    full: Step
    whole: Summary
    """A whole run on the last records."""
    split: str
    """A key with a message in the oldest hour and one in the hour after it."""
    orders: dict[str, str]
    """Keys of the others, by what is wrong with them."""
    parked: str


@pytest.fixture(scope="module")
def steps(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("steps")
    database, world = sqlite_database(folder), _world(SETTLED)
    without_keys(world)
    parked = world.unsent("parked", key=str(world.order(age_ms=5 * HOUR_MS)), age_ms=5 * HOUR_MS)
    unsent = world.outbox[0]["message_key"]
    split = str(world.order(age_ms=7 * HOUR_MS))
    for age_hours in (7, 6):
        done(world, f"{age_hours} hours ago", key=split, age_ms=age_hours * HOUR_MS)
    twice, lost = (str(world.order(age_ms=4 * HOUR_MS)) for _ in range(2))
    done(world, "once", key=twice, age_ms=4 * HOUR_MS)
    moved = _reminded(world, age_ms=3 * HOUR_MS)
    done(world, "early", key="900", age_ms=90 * MINUTE_MS)
    with_timed_ids(world)
    own = world.sent("own-id", key=str(world.order(age_ms=4 * HOUR_MS)), age_ms=4 * HOUR_MS)
    place = world.store(own, key=world.archive[-1]["message_key"], age_ms=4 * HOUR_MS)
    world.done(own, place, TICKETS, age_ms=4 * HOUR_MS)
    settings = two_rules_more(world.write(database, folder))

    def step(minute: int, *, full: bool = False) -> Step:
        world.write(database, folder)
        summary = _run(settings, spark, since_ms=NOW_MS - 7 * HOUR_MS, now_ms=NOW_MS + minute * MINUTE_MS, full=full)
        business = _tables(settings, "business_verdicts")
        return Step(
            summary=summary, versions=_versions(settings), rows=_rows_of_windows(settings), business=business
        )  # fmt: skip

    first, unchanged = step(0), step(1)

    order = str(world.order(age_ms=3 * HOUR_MS))
    done(world, timed_id("late", NOW_MS - 3 * HOUR_MS), key=order, age_ms=3 * HOUR_MS)
    alone = str(world.order(age_ms=3 * HOUR_MS))
    world.order(age_ms=3 * HOUR_MS, status=KEYLESS)
    world.done(own, place, MAIL, age_ms=3 * HOUR_MS)  # names no time but that of an hour later
    done(world, timed_id("later", NOW_MS - 6 * HOUR_MS), key=split, age_ms=6 * HOUR_MS)
    late = step(2)

    world.outbox[0]["state"] = "parked"
    world.orders[moved - 1]["remind_at_us"] += HOUR_MS * 1000
    world.orders.append({**world.orders[0], "id": 900, "paid_at_us": (NOW_MS - 2 * HOUR_MS) * 1000})
    for key in (twice, lost):
        done(world, timed_id(f"late {key}", NOW_MS - 2 * HOUR_MS), key=key, age_ms=2 * HOUR_MS)
    changed = step(3)

    return Steps(
        first=first, unchanged=unchanged, late=late, changed=changed, full=step(4, full=True),
        whole=run(replace(settings, output=folder / "whole"), session=spark, now_ms=NOW_MS + 4 * MINUTE_MS),
        split=split, parked=timed_id(parked, NOW_MS - 5 * HOUR_MS),
        orders={"unsent": unsent, "lost": lost, "twice": twice, "moved": str(moved), "alone": alone},
    )  # fmt: skip


@pytest.mark.spark
def test_a_key_is_judged_with_all_that_stands_under_it_at_other_times(steps: Steps) -> None:
    unsent = steps.orders["unsent"]

    assert steps.first.rows == {
        ("business", steps.split, "paid orders are announced", "duplicate", "published_twice"),
        ("business", steps.orders["lost"], "paid orders are announced", "lost", "no_message"),
        ("business", unsent, "paid orders are announced", "unsent", "message_unsent"),
        ("message", steps.parked, "", "unsent", "not_sent"),
        ("message", timed_id("early", NOW_MS - 90 * MINUTE_MS), "", "phantom", "no_business_row"),
        ("delivery", "own-id", MAIL, "late", "not_delivered"),
        ("business", None, "nameless", "unknown", "no_key"),
    }
    looked_at = {row["message_key"] for row in steps.first.business}
    settled = {str(number) for number in range(1, SETTLED + 1)}
    assert not looked_at & settled, "orders for which all is well were settled in bulk"


@pytest.mark.spark
def test_hours_in_which_nothing_changed_are_not_judged_again(steps: Steps) -> None:
    assert (_judged(steps.first.summary), _judged(steps.unchanged.summary)) == (7, 0)
    assert steps.unchanged.versions == steps.first.versions


@pytest.mark.spark
def test_only_windows_that_changed_or_share_a_key_with_one_are_judged_again(steps: Steps) -> None:
    first, late = steps.first.summary, steps.late.summary

    assert (_judged(late), steps.late.changed_since(steps.unchanged)) == (4, [6, 5, 3, 2])
    assert (late.messages, late.message_groups) == (first.messages + 2, first.message_groups + 4)
    assert late.unexplained == 0


@pytest.mark.spark
def test_what_is_new_under_another_key_opens_no_other_hour_of_a_finding(steps: Steps) -> None:
    assert steps.late.rows - steps.first.rows == {
        ("business", steps.orders["alone"], "paid orders are announced", "lost", "no_message"),
        ("delivery", "own-id", MAIL, "late", "delivered_late"),
    }
    assert steps.first.rows - steps.late.rows == {("delivery", "own-id", MAIL, "late", "not_delivered")}, "it came late"


@pytest.mark.spark
def test_rows_without_a_key_are_one_verdict_an_hour_when_it_is_judged_again(steps: Steps) -> None:
    assert _without_key(steps.first.business) == WITHOUT_KEY
    (oldest, (middle_ms, middle), latest) = WITHOUT_KEY

    assert _without_key(steps.late.business) == [oldest, (middle_ms, middle + 1), latest]


@pytest.mark.spark
def test_a_key_that_is_looked_at_opens_its_other_hours(steps: Steps) -> None:
    found = {("business", steps.split, "paid orders are announced", "duplicate", "published_twice")}

    assert steps.late.changed_since(steps.unchanged)[0] == 6, "nothing came in this hour"
    for step in (steps.first, steps.late):
        assert {row for row in step.rows if row[1] == steps.split} == found


@pytest.mark.spark
def test_what_comes_later_opens_every_hour_whose_verdict_it_changes(steps: Steps) -> None:
    assert steps.changed.rows == {
        ("message", steps.parked, "", "parked", "parked"),
        ("business", steps.orders["unsent"], "paid orders are announced", "parked", "message_parked"),
        ("business", steps.orders["twice"], "paid orders are announced", "duplicate", "published_twice"),
        ("business", steps.orders["moved"], "travellers are reminded", "mismatch", "due_time_differs"),
        ("business", steps.split, "paid orders are announced", "duplicate", "published_twice"),
        ("business", steps.orders["alone"], "paid orders are announced", "lost", "no_message"),
        ("business", None, "nameless", "unknown", "no_key"),
        ("delivery", "own-id", MAIL, "late", "delivered_late"),
    }
    assert steps.changed.rows == _rows_of_run(steps.whole)
    assert _books(steps.changed.summary) == _books_of_tables(steps.whole)


@pytest.mark.spark
def test_a_full_run_looks_at_every_row_of_hours_that_stand(steps: Steps) -> None:
    summary = steps.full.summary

    assert summary.windows is not None
    assert summary.windows.judged == 7
    assert summary.windows.looked_at == summary.messages + summary.message_groups
    assert (steps.full.rows, _books(summary)) == (steps.changed.rows, _books(steps.changed.summary))


# -- what a run does not look at -------------------------------------------------------------------------------------


@pytest.mark.spark
def test_a_message_older_than_the_span_is_of_no_row_in_it_and_costs_nothing(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world(0)
    for number, age_ms in enumerate([12 * HOUR_MS] * 3 + [2 * HOUR_MS]):
        world.order(age_ms=age_ms, remind_at_ms=7)
        sequence = world.store(world.sent(f"{number}", key="7000", age_ms=age_ms), key="7000", age_ms=age_ms)
        world.done(f"{number}", sequence, TICKETS, age_ms=age_ms)
        world.done(f"{number}", sequence, MAIL, age_ms=age_ms - 10 * MINUTE_MS)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    settings = replace(settings, rules=[replace(settings.rules[0], key_column="remind_at_us")])
    compared: list[int] = []

    def counting(rows: Any, messages: Any, *, covered: Any) -> Any:
        compared.append(messages.count())
        return unsettled(rows, messages, covered=covered)

    monkeypatch.setattr(drill_down, "unsettled", counting)
    _run(settings, spark)

    late = ("delivery", world.archive[-1]["id"], MAIL, "late", "delivered_late")
    assert _rows_of_windows(settings) == {late}
    assert compared == [0], "messages in parts of the span that disagree"


@pytest.mark.spark
def test_an_inbox_whose_clock_is_hours_behind_has_lost_nothing(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, behind_ms = _world(6), 3 * HOUR_MS
    with_timed_ids(world)
    for row in world.inbox:
        row["handled_at_us"] -= behind_ms * 1000
    settings = world.write(sqlite, tmp_path)
    slow = Database(name="sqlite", url=f"sqlite:///{tmp_path / 'slow.db'}", schema=None)
    world.write_tables(slow)
    right = DbApiReader.now_ms
    monkeypatch.setattr(DbApiReader, "now_ms", lambda one: right(one) - behind_ms * ("slow" in str(one.address)))

    summary = _run(replace(settings, inboxes=[InboxSource(group=TICKETS, url=slow.url)]), spark)

    assert summary.balanced
    assert len(summary.clock_sentences) == 1
    assert summary.windows is not None
    assert summary.windows.looked_at == 0, "all was settled in bulk"


# -- a second look ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """A run, three windows a batch, between whose looks a slow broker stored a message and a compensator sent another,
    and one that follows.
    """

    settings: Settings
    waits: list[float]
    summary: Summary
    unsent: dict[str, str]
    """Ids of rows of the outbox's table, by their names."""
    lost: str
    findings: set[tuple[Any, ...]]
    rows: set[tuple[Any, ...]]
    business: list[dict[str, Any]]
    cleared: Summary
    """Behind the run, the outbox's table was emptied, and an order came for which there is no message."""
    rows_then: set[tuple[Any, ...]]
    twice: str
    """A key with two messages, three hours apart."""
    later: str
    """The key of that order, in the hour of the first of them."""


@pytest.fixture(scope="module")
def second_look(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> SecondLook:
    folder = tmp_path_factory.mktemp("second-look")
    database, world = sqlite_database(folder), _world(4)
    without_keys(world)
    for name, age_ms in {"young": 20 * MINUTE_MS, "old": 40 * HOUR_MS, "sent meanwhile": 39 * HOUR_MS}.items():
        world.unsent(name, key=str(world.order(age_ms=age_ms)), age_ms=age_ms)
    world.unsent("fresh", key=None, age_ms=1, topic="newsletter")
    world.store(world.unsent("stored", key=None, age_ms=30 * HOUR_MS, topic="newsletter"), key=None, topic="newsletter")
    world.unsent("of 2300", key=None, age_ms=29 * HOUR_MS, topic="newsletter")
    unsent = [row["id"] for row in world.outbox]
    twice = str(world.order(age_ms=5 * HOUR_MS))
    for age_hours in (5, 2):
        done(world, f"{age_hours} hours ago", key=twice, age_ms=age_hours * HOUR_MS)
    orders = [world.order(age_ms=2 * HOUR_MS), world.order(age_ms=2 * HOUR_MS)]
    names = [world.sent(f"slow-{order}", key=str(order), age_ms=2 * HOUR_MS) for order in orders]
    with_timed_ids(world)
    world.outbox[-1]["created_at_us"] = CENTURIES_MS * 1000
    settings = two_rules_more(world.write(database, folder))
    settings = replace(settings, limits=RunLimits(windows_a_batch=3))
    ids = dict(zip(unsent, (row["id"] for row in world.outbox), strict=True))
    slow, lost = (row["id"] for row in world.archive[-2:])
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:  # before the oldest hours are looked at again
            return
        if len(waits) > 2:  # before rows of the outbox's table outside of the hours are looked at again
            world.outbox[:] = [row for row in world.outbox if row["id"] != ids["sent meanwhile"]]
            world.write_tables(database)
            return
        sequence = world.store(slow, key=str(orders[0]), age_ms=2 * HOUR_MS, body=names[0])
        append(settings, "messages", [world.stored[-1]])
        known = len(world.actions)
        for group in (TICKETS, MAIL):
            world.done(slow, sequence, group, age_ms=2 * HOUR_MS)
        append(settings, "actions", world.actions[known:])
        world.write_tables(database)

    summary = _run(settings, spark, pause=pause)
    findings = {(row["message_id"], row["rule"], row["confirmed"]) for row in _tables(settings, "verdicts")}
    rows, business = _rows_of_windows(settings), _tables(settings, "business_verdicts")

    world.outbox.clear()
    later = str(world.order(age_ms=5 * HOUR_MS))
    world.write_tables(database)
    cleared = _run(settings, spark, now_ms=NOW_MS + 1)
    return SecondLook(
        settings=settings, waits=waits, summary=summary, unsent=ids, lost=lost, findings=findings, rows=rows,
        business=business, cleared=cleared, rows_then=_rows_of_windows(settings), twice=twice, later=later,
    )  # fmt: skip


@pytest.mark.spark
def test_a_suspect_that_a_second_look_clears_is_no_finding(second_look: SecondLook) -> None:
    summary = second_look.summary

    assert second_look.waits == [second_look.settings.grace.confirm_after_seconds] * 3
    assert summary.windows is not None
    assert summary.windows.resolved == 2, "the message and its business row"
    assert {one for one in second_look.findings if one[1] not in PLAIN} == {(second_look.lost, "not_in_broker", True)}
    assert summary.sentence == "Not balanced: 3 unsent, 1 lost, 1 duplicate, 4 unknown."


@pytest.mark.spark
def test_what_stands_in_the_outbox_is_told_in_whatever_hour_it_was_made(second_look: SecondLook) -> None:
    summary, ids = second_look.summary, second_look.unsent

    assert {one.id for one in summary.examples if one.rule == "not_sent"} == {
        ids["young"], ids["old"], ids["of 2300"],
    }  # fmt: skip
    assert summary.windows is not None
    assert (summary.windows.outside, summary.messages) == (4, 12)
    table = pq.read_table(Path(summary.folder) / "overdue").to_pylist()
    assert {row["message_id"]: row["rule"] for row in table} == {
        ids["young"]: "not_sent",
        ids["old"]: "not_sent",
        ids["of 2300"]: "not_sent",
        ids["stored"]: "not_removed_yet",
    }
    assert second_look.cleared.sentence == "Not balanced: 2 lost, 1 duplicate, 4 unknown."


@pytest.mark.spark
def test_a_finding_stays_where_the_hours_of_its_key_are_judged_apart(second_look: SecondLook) -> None:
    twice, later = second_look.twice, second_look.later
    found = ("business", twice, "paid orders are announced", "duplicate", "published_twice")

    at_first, then = (
        {row for row in rows if row[1] in {twice, later}} for rows in (second_look.rows, second_look.rows_then)
    )

    assert at_first == {found}
    assert then == {found, ("business", later, "paid orders are announced", "lost", "no_message")}


@pytest.mark.spark
def test_rows_without_a_key_are_one_verdict_an_hour_however_many_hours_are_judged_together(
    second_look: SecondLook,
) -> None:
    assert _without_key(second_look.business) == WITHOUT_KEY


# -- without Spark ---------------------------------------------------------------------------------------------------


def test_a_store_killed_at_any_write_shows_the_old_windows_or_the_new_ones_whole(tmp_path: Path) -> None:
    writes: list[str] = []
    _show(tmp_path / "counted", "old", checkpoint=writes.append)
    assert len(writes) == 6

    for number in range(len(writes)):
        output = tmp_path / str(number)
        _show(output, "old")
        with pytest.raises(Killed):
            _show(output, "new", checkpoint=_kill_at(number))
        shown = _shown(output)
        assert shown in ({1: "old", 2: "old"}, {1: "new", 2: "new"}), writes[number]
        assert (shown[1] == "new") == (writes[number] == "sweep")

        _show(output, "new")
        assert _shown(output) == {1: "new", 2: "new"}
        store = WindowStore(output)
        store.staging()
        kept = sorted(str(path.relative_to(output)) for path in output.rglob("*.txt"))
        assert kept == ["windows/1/v-new/rows.txt", "windows/2/v-new/rows.txt"], "nothing else is left"


def test_all_that_the_index_names_is_synced_before_it_is(tmp_path: Path) -> None:
    synced: list[int] = []
    indexes: list[int] = []

    def sync(descriptor: int) -> None:
        is_shown = (tmp_path / "windows.json").exists()
        (indexes if is_shown else synced).append(os.fstat(descriptor).st_ino)

    store = WindowStore(tmp_path, sync=sync)
    table = store.staging() / "1" / "verdicts"
    table.mkdir(parents=True)
    (table / "part.parquet").write_bytes(b"rows")
    store.publish({1: Window(fingerprint="f", version="v", judged_at_ms=1, open=False, result={})})

    named = ["windows", "windows/1", "windows/1/v", "windows/1/v/verdicts", "windows/1/v/verdicts/part.parquet"]
    assert [one for one in named if (tmp_path / one).stat().st_ino not in synced] == []
    assert synced[-1] == (tmp_path / "windows.json").stat().st_ino
    assert indexes == [tmp_path.stat().st_ino]


def test_topics_of_earlier_windows_are_known_unless_nobody_here_published_to_them() -> None:
    tallies = [Tally(), Tally()]
    tallies[0].add((Scope.MESSAGE, "order.paid", "", "stored"), 2)
    tallies[0].add((Scope.DELIVERY, "mail.sent", "mail", "done"), 2)
    tallies[1].add((Scope.MESSAGE, "weather", "", "foreign_topic"), 1)
    tallies[1].add((Scope.MESSAGE, "newsletter", "", "not_in_broker"), 1)

    assert published_topics(tally.as_result() for tally in tallies) == {"order.paid", "newsletter"}


def test_findings_of_hours_before_the_span_are_told_until_they_are_judged_again() -> None:
    tally = Tally()
    tally.add((Scope.MESSAGE, "order.paid", "", "not_in_broker"), 2)
    tally.add((Scope.BUSINESS, "order.paid", "rule", "message_lost"), 2)
    tally.add((Scope.MESSAGE, "order.paid", "", "not_sent"), 4)
    tally.add((Scope.MESSAGE, "order.paid", "", "parked"), 8)

    count = findings_of([tally.as_result(), Tally().as_result()])

    assert count == 2, "echoes apart, and what stands in the outbox, which every run judges"


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "windows.json").write_text("{")
    with pytest.raises(ConfigurationError, match="move it away to begin anew"):
        WindowStore(tmp_path)

    (tmp_path / "windows.json").write_text('{"format": 99, "windows": {}}')
    with pytest.raises(ConfigurationError, match="another version"):
        WindowStore(tmp_path)


def test_hours_are_whole_and_closed_ones_only() -> None:
    half_past = 10 * HOUR_MS + 30 * MINUTE_MS

    def starts(since_ms: int, until_ms: int, *, now_ms: int) -> list[int]:
        found = closed_windows(since_ms, until_ms, now_ms=now_ms, grace_ms=MINUTE_MS)
        return [start // HOUR_MS for start in found]

    assert starts(7 * HOUR_MS + 5, half_past, now_ms=half_past) == [7, 8, 9]
    assert starts(7 * HOUR_MS, 9 * HOUR_MS, now_ms=half_past) == [7, 8]
    assert starts(7 * HOUR_MS, 11 * HOUR_MS, now_ms=11 * HOUR_MS + MINUTE_MS - 1) == [7, 8, 9]
    assert starts(7 * HOUR_MS, 11 * HOUR_MS, now_ms=11 * HOUR_MS + MINUTE_MS) == [7, 8, 9, 10]
    with pytest.raises(ConfigurationError, match="earlier --since"):
        starts(9, 9, now_ms=half_past)
    with pytest.raises(ConfigurationError, match="at most"):
        starts(0, NOW_MS, now_ms=NOW_MS)


@pytest.mark.parametrize("grace_ms", [0, MINUTE_MS, 61 * MINUTE_MS])
def test_there_is_always_an_hour_that_is_over(grace_ms: int) -> None:
    for now_ms in range(NOW_MS, NOW_MS + HOUR_MS + 1, MINUTE_MS // 2):
        newest_ms = newest_closed(now_ms, grace_ms=grace_ms)

        assert closed_windows(newest_ms, now_ms, now_ms=now_ms, grace_ms=grace_ms) == [newest_ms]


def test_an_output_folder_has_one_writer(sqlite: Database, tmp_path: Path) -> None:
    from spark_reconcile.runs.reconciliation import only_run

    settings = _world(1).write(sqlite, tmp_path)

    with only_run(settings.output), pytest.raises(ConfigurationError, match="another run writes"):
        run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS)


def _show(output: Path, text: str, *, checkpoint: Any = lambda _: None) -> None:
    """Two windows, each with one file that says which they are."""
    output.mkdir(exist_ok=True)
    store = WindowStore(output, checkpoint=checkpoint)
    stage = store.staging()
    checkpoint("write")
    for start in (1, 2):
        (stage / str(start)).mkdir()
        (stage / str(start) / "rows.txt").write_text(text)
    window = Window(fingerprint=text, version=f"v-{text}", judged_at_ms=0, open=False, result={})
    store.publish({1: window, 2: window})


def _shown(output: Path) -> dict[int, str]:
    store = WindowStore(output)
    return {start: (store.folder(start) / "rows.txt").read_text() for start in store.windows}


class Killed(BaseException):
    """The process ends here: nothing catches it."""


def _kill_at(number: int) -> Any:
    reached = iter(range(1_000))

    def checkpoint(_: str) -> None:
        if next(reached) == number:
            raise Killed

    return checkpoint


def _kill_at_write(name: str) -> Any:
    def checkpoint(write: str) -> None:
        if write == name:
            raise Killed

    return checkpoint


def _run(
    settings: Settings, spark: SparkSession, *, since_ms: int = SINCE_MS, now_ms: int = NOW_MS, pause: Any = no_wait,
    full: bool = False, checkpoint: Callable[[str], None] = lambda _: None,
) -> Summary:  # fmt: skip
    return run_windows(
        settings, since_ms=since_ms, now_ms=now_ms, session=spark, pause=pause, full=full, checkpoint=checkpoint
    )


def _world(balanced: int) -> World:
    world = World()
    world.groups()
    for number in range(balanced):
        world.settled(age_ms=4 * HOUR_MS - number * 2 * MINUTE_MS)
    return world


def _ids(world: World) -> list[str]:
    """Of every message, in the order in which they were planted."""
    return [*(row["id"] for row in (*world.outbox, *world.archive)), *(one.id for one in world.stored)]


def _reminded(world: World, *, age_ms: int) -> int:
    """A scheduled message that fell due half an hour after its business row."""
    due_ms = NOW_MS - age_ms + 30 * MINUTE_MS
    order = world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=age_ms)
    world.sent("due", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=age_ms)
    world.store("due", key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=age_ms)
    sequence = world.fire("due", age_ms=age_ms - 30 * MINUTE_MS)
    world.done("due", sequence, MAIL, age_ms=age_ms - 30 * MINUTE_MS, topic=REMINDER)
    return order


def _without_key(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The newest time and the count of each verdict on rows without a key."""
    return sorted((row["at_ms"], row["rows"]) for row in rows if row["business_rule"] == "nameless")


def _judged(summary: Summary) -> int:
    assert summary.windows is not None
    return summary.windows.judged


def _versions(settings: Settings) -> dict[int, str]:
    return {start: window.version for start, window in WindowStore(settings.output).windows.items()}


def _tables(settings: Settings, name: str) -> list[dict[str, Any]]:
    store, rows = WindowStore(settings.output), []
    for start in store.windows:
        folder = store.folder(start) / name
        rows += pq.read_table(folder).to_pylist() if folder.exists() else []
    return rows


def _rows_of_windows(settings: Settings) -> set[Verdict]:
    """Every verdict that is not plainly settled."""
    return _unsettled(_tables(settings, "verdicts"), _tables(settings, "business_verdicts"))


def _rows_of_run(summary: Summary, *, only_open: bool = False) -> set[Verdict]:
    """The same of a whole run."""
    rows, business = (
        [row for row in pq.read_table(Path(summary.folder) / name).to_pylist() if not only_open or _hour(row) > LATEST]
        for name in ("verdicts", "business_verdicts")
    )
    return _unsettled(rows, business)


def _rows_of_open_hours(summary: Summary) -> set[Verdict]:
    """The verdicts of a whole run that a run by the hour gives later: their hour is not over."""
    return _rows_of_run(summary, only_open=True)


def _unsettled(rows: list[dict[str, Any]], business: list[dict[str, Any]]) -> set[Verdict]:
    found = {
        (row["scope"], row["message_id"], row["consumer_group"] or "", row["state"], row["rule"])
        for row in rows
        if row["rule"] not in PLAIN
    }
    return found | {
        ("business", row["message_key"], row["business_rule"], row["state"], row["rule"])
        for row in business
        if row["rule"] not in PLAIN
    }


def _same(found: set[Verdict], expected: set[Verdict]) -> None:
    assert (sorted(found - expected, key=str), sorted(expected - found, key=str)) == ([], [])


def _books(summary: Summary) -> Counter[tuple[str, str, str, str]]:
    found: Counter[tuple[str, str, str, str]] = Counter()
    for one in summary.verdict_counts:
        found[one.scope.value, one.topic, one.of, one.rule] += one.count
    return found


def _books_of_tables(summary: Summary) -> Counter[tuple[str, str, str, str]]:
    folder = Path(summary.folder)
    found: Counter[tuple[str, str, str, str]] = Counter()
    for row in pq.read_table(folder / "verdicts").to_pylist():
        if _hour(row) <= LATEST:
            found[row["scope"], row["topic"] or "", row["consumer_group"] or "", row["rule"]] += 1
    for row in pq.read_table(folder / "business_verdicts").to_pylist():
        if EARLIEST_MS < row["at_ms"] < LATEST + HOUR_MS:
            found["business", row["topic"], row["business_rule"], row["rule"]] += row["rows"]
    return found


def _hour(row: dict[str, Any]) -> int:
    time_ms = row.get("published_ms") or row.get("stored_ms") or row["at_ms"]
    return int(time_ms) // HOUR_MS * HOUR_MS
