"""Runs by the hour: the same verdicts as a whole run, only for what is new, changed or moving, and twice looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import (
    Condition,
    InboxSource,
    Operator,
    Settings,
    Summary,
    run,
    run_windows,
)
from spark_reconcile.compare import drill_down
from spark_reconcile.compare.key_digests import unsettled
from spark_reconcile.core.run_limits import RunLimits
from spark_reconcile.results.window_selection import closed_windows
from spark_reconcile.results.window_store import Window, WindowStore
from spark_reconcile.results.window_totals import Tally, findings_of, published_topics
from spark_reconcile.rules.verdict_rule import Scope
from spark_reconcile.runs.stored_run import stored_hours
from spark_reconcile.sources.dbapi_reader import Reader
from tests.fixtures.databases import Database
from tests.spark_reconcile.faults import plant_all
from tests.spark_reconcile.timed_ids import timed_id, with_timed_ids
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    PAID,
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
LATEST = NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS
"""The last hour that is over."""


@pytest.mark.spark
@pytest.mark.parametrize("timed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_windows_give_the_verdicts_of_a_whole_run(
    spark: SparkSession, sqlite: Database, tmp_path: Path, timed: bool
) -> None:
    world = _world(60)
    plant_all(world)
    if timed:
        with_timed_ids(world)
        # A producer's clock was wrong by a day: the message belongs to the hour of its row, and is lost there.
        astray = timed_id("astray", NOW_MS - 30 * HOUR_MS)
        world.sent(astray, key=str(world.order(age_ms=2 * HOUR_MS)), age_ms=2 * HOUR_MS)
    settings = world.write(sqlite, tmp_path, records_a_segment=40)

    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS)
    summary = _run(settings, spark)

    assert _rows_of_windows(settings) == _rows_of_run(whole)
    assert _books(summary) == _books_of_tables(whole)
    assert summary.unexplained == 0
    assert {(one.topic, one.p50_ms) for one in summary.latencies if one.hop == "commit to broker"} == {
        (topic, 10) for topic in (PAID, REMINDER, "newsletter", "newsletter.old", "newsletter.paused", "weather")
    }
    again = stored_hours(settings.output, since_ms=SINCE_MS, until_ms=NOW_MS)
    assert (again.latencies, again.windows and again.windows.untimed) == (summary.latencies, 0)
    if timed:
        assert ("message", astray, None, "not_in_broker", "lost") in _rows_of_windows(settings)
    assert summary.windows is not None
    if timed:
        looked_at = summary.windows.looked_at
        assert looked_at < summary.messages + summary.message_groups - 60, "nothing was settled in bulk"


@pytest.mark.spark
def test_a_key_is_judged_with_all_that_stands_under_it_at_other_times(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(20)
    again = world.sent("again", key=str(world.orders[0]["id"]), age_ms=2 * HOUR_MS)
    sequence = world.store(again, key=str(world.orders[0]["id"]), age_ms=2 * HOUR_MS)
    for group in (TICKETS, MAIL):
        world.done(again, sequence, group, age_ms=2 * HOUR_MS)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)

    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS)
    summary = _run(settings, spark)

    key = str(world.orders[0]["id"])
    assert _rows_of_windows(settings) == {
        ("business", key, "paid orders are announced", "published_twice", "duplicate")
    }
    assert _books(summary) == _books_of_tables(whole)
    assert len(_tables(settings, "business_verdicts")) == 1, "the other orders were settled in bulk"


@pytest.mark.spark
def test_only_windows_that_changed_or_still_move_are_judged_again(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(20)
    with_timed_ids(world)
    world.settled(age_ms=5 * HOUR_MS)
    own = world.sent("own-id", key=str(world.order(age_ms=2 * HOUR_MS)), age_ms=2 * HOUR_MS)
    place = world.store(own, key=world.archive[-1]["message_key"], age_ms=2 * HOUR_MS)
    world.done(own, place, TICKETS, age_ms=2 * HOUR_MS)
    settings = world.write(sqlite, tmp_path)
    first = _run(settings, spark)
    before = _versions(settings)

    unchanged = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS)
    assert (_judged(first), _judged(unchanged)) == (5, 0)
    assert _versions(settings) == before

    order = world.order(age_ms=3 * HOUR_MS)
    late = world.sent(f"{NOW_MS - 3 * HOUR_MS:012x}7abc8{'0' * 15}", key=str(order), age_ms=3 * HOUR_MS)
    sequence = world.store(late, key=str(order), age_ms=3 * HOUR_MS)
    for group in (TICKETS, MAIL):
        world.done(late, sequence, group, age_ms=3 * HOUR_MS)
    world.done(own, place, MAIL, age_ms=HOUR_MS)  # names no time but that of an hour later
    world.write(sqlite, tmp_path)
    third = _run(settings, spark, now_ms=NOW_MS + 2 * MINUTE_MS)

    changed = {start for start, version in _versions(settings).items() if version != before[start]}
    assert (_judged(third), changed) == (2, {LATEST - 2 * HOUR_MS, LATEST - HOUR_MS})
    assert (third.messages, third.message_groups, third.balanced) == (23, 46, True)


@pytest.mark.spark
def test_a_full_run_looks_at_every_row_of_hours_that_stand(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(6)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    first = _run(settings, spark)

    again = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS, full=True)

    assert first.windows is not None
    assert again.windows is not None
    assert (first.windows.looked_at, again.windows.judged) == (0, 5)
    assert again.windows.looked_at == again.messages + again.message_groups == 6 * 3


@pytest.mark.spark
def test_what_comes_later_opens_every_hour_whose_verdict_it_changes(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(0)
    parked = world.unsent("parked", key=str(world.order(age_ms=5 * HOUR_MS)), age_ms=5 * HOUR_MS)
    twice, lost = world.order(age_ms=4 * HOUR_MS), world.order(age_ms=4 * HOUR_MS)
    _done(world, "once", key=str(twice), age_ms=4 * HOUR_MS)
    moved = _reminded(world, age_ms=3 * HOUR_MS)
    _done(world, "early", key="900", age_ms=90 * MINUTE_MS)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    assert _judged(_run(settings, spark)) == 5
    assert len(_rows_of_windows(settings)) == 4, "unsent, lost, and a message that no row asks for"

    world.outbox[0]["state"] = "parked"
    world.orders[moved - 1]["remind_at_us"] += HOUR_MS * 1000
    world.orders.append({**world.orders[0], "id": 900, "paid_at_us": (NOW_MS - 2 * HOUR_MS) * 1000})
    for key in (twice, lost):
        _done(world, timed_id(f"late {key}", NOW_MS - 2 * HOUR_MS), key=str(key), age_ms=2 * HOUR_MS)
    world.write(sqlite, tmp_path)
    summary = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS)
    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS + MINUTE_MS)

    assert _rows_of_windows(settings) == {
        ("message", timed_id(parked, NOW_MS - 5 * HOUR_MS), None, "parked", "parked"),
        ("business", world.outbox[0]["message_key"], "paid orders are announced", "message_parked", "parked"),
        ("business", str(twice), "paid orders are announced", "published_twice", "duplicate"),
        ("business", str(moved), "travellers are reminded", "due_time_differs", "mismatch"),
    }
    assert _rows_of_windows(settings) == _rows_of_run(whole)
    assert _books(summary) == _books_of_tables(whole)


@pytest.mark.spark
def test_a_key_that_is_looked_at_opens_its_other_hours_and_one_that_is_not_opens_none(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(0)
    twice = str(world.order(age_ms=5 * HOUR_MS))
    for age_hours in (5, 2):
        _done(world, f"{age_hours} hours ago", key=twice, age_ms=age_hours * HOUR_MS)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    _run(settings, spark)
    wrong = ("business", twice, "paid orders are announced", "published_twice", "duplicate")
    assert _rows_of_windows(settings) == {wrong}

    world.order(age_ms=3 * HOUR_MS)
    world.write(sqlite, tmp_path)
    beside = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS)

    assert (_judged(beside), len(_rows_of_windows(settings))) == (1, 2), "what is new is under another key"

    _done(world, timed_id("later", NOW_MS - 2 * HOUR_MS), key=twice, age_ms=2 * HOUR_MS)
    world.write(sqlite, tmp_path)
    changed = _run(settings, spark, now_ms=NOW_MS + 2 * MINUTE_MS)

    assert _judged(changed) == 2, "the hour that changed, and the other one of its key"
    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS + 2 * MINUTE_MS)
    assert _rows_of_windows(settings) == _rows_of_run(whole)


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
    for full in (False, True):
        run_windows(settings, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait, full=full)
        late = ("delivery", world.archive[-1]["id"], MAIL, "handed_out_late", "late")
        assert _rows_of_windows(settings) == {late}
        (settings.output / "windows.json").unlink()
    assert compared == [0], "messages in parts of the span that disagree"


@pytest.mark.spark
def test_rules_on_one_topic_and_key_ask_for_a_message_each(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(6)
    both, more, less = (world.order(age_ms=2 * HOUR_MS) for _ in range(3))
    for order, count in ((both, 2), (more, 3), (less, 1)):
        for number in range(count):
            _done(world, f"of-{order}-{number}", key=str(order), age_ms=2 * HOUR_MS)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    again = [Condition(column="id", operator=Operator.IN, values=(both, more, less))]
    settings = replace(settings, rules=[*settings.rules, replace(settings.rules[0], name="second", where=again)])

    summary = _run(settings, spark)

    assert _rows_of_windows(settings) == {
        ("business", str(order), rule, verdict, state)
        for rule in ("paid orders are announced", "second")
        for order, verdict, state in (
            (more, "published_twice", "duplicate"), (less, "too_few_messages", "lost"),
        )
    }  # fmt: skip
    assert summary.business_rows == 12
    whole = run(settings, session=spark, now_ms=NOW_MS)
    assert whole.sentence == summary.sentence == "Not balanced: 2 lost, 2 duplicate."


@pytest.mark.spark
def test_rows_without_a_key_are_one_verdict_an_hour_however_hours_are_judged(
    spark: SparkSession, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world(0)
    for age_ms in (3 * HOUR_MS, 3 * HOUR_MS - MINUTE_MS, 2 * HOUR_MS, HOUR_MS):
        world.order(age_ms=age_ms)
    settings = world.write(sqlite, tmp_path)
    nameless = replace(settings.rules[0], name="nameless", key_column="remind_at_us", topic="refund")
    settings = replace(settings, rules=[nameless], inboxes=[])
    whole = run(replace(settings, output=tmp_path / "whole"), session=spark, now_ms=NOW_MS)
    wanted = [(NOW_MS - 3 * HOUR_MS + MINUTE_MS, 2), (NOW_MS - 2 * HOUR_MS, 1), (NOW_MS - HOUR_MS, 1)]

    assert _without_key(pq.read_table(Path(whole.folder) / "business_verdicts").to_pylist()) == wanted
    for size in (2, 168):
        some = replace(settings, output=tmp_path / str(size), limits=RunLimits(windows_a_batch=size))
        summary = _run(some, spark, since_ms=NOW_MS - 3 * HOUR_MS)
        assert _without_key(_tables(some, "business_verdicts")) == wanted
        assert summary.sentence == whole.sentence == "Not balanced: 4 unknown."

    world.order(age_ms=2 * HOUR_MS)
    world.write(sqlite, tmp_path)
    again = _run(some, spark, since_ms=NOW_MS - 3 * HOUR_MS, now_ms=NOW_MS + 1)
    wanted[1] = (wanted[1][0], 2)
    assert (_judged(again), _without_key(_tables(some, "business_verdicts"))) == (1, wanted)


@pytest.mark.spark
def test_what_stands_in_the_outbox_is_told_in_whatever_hour_it_was_made(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(2)
    for name, age_ms in {"young": 20 * MINUTE_MS, "old": 40 * HOUR_MS, "sent meanwhile": 39 * HOUR_MS}.items():
        world.unsent(name, key=str(world.order(age_ms=age_ms)), age_ms=age_ms)
    world.unsent("fresh", key=None, age_ms=1, topic="newsletter")
    world.store(world.unsent("stored", key=None, age_ms=30 * HOUR_MS, topic="newsletter"), key=None, topic="newsletter")
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)

    def compensate(_: float) -> None:
        del world.outbox[2]
        world.write_tables(sqlite)

    summary = _run(settings, spark, pause=compensate)

    assert summary.sentence == "Not balanced: 2 unsent."
    assert {(one.id, one.rule) for one in summary.examples} == {(row["id"], "not_sent") for row in world.outbox[:2]}
    assert summary.windows is not None
    assert (summary.windows.outside, summary.messages) == (3, 5)
    table = pq.read_table(Path(summary.folder) / "overdue").to_pylist()
    assert {row["message_id"]: row["rule"] for row in table} == {
        world.outbox[0]["id"]: "not_sent",
        world.outbox[1]["id"]: "not_sent",
        world.outbox[3]["id"]: "not_removed_yet",
    }

    world.outbox.clear()
    world.write_tables(sqlite)
    assert _run(settings, spark, now_ms=NOW_MS + 1).balanced


@pytest.mark.spark
def test_a_suspect_that_a_second_look_clears_is_no_finding(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(4)
    orders = [world.order(age_ms=2 * HOUR_MS), world.order(age_ms=2 * HOUR_MS)]
    names = [world.sent(f"slow-{order}", key=str(order), age_ms=2 * HOUR_MS) for order in orders]
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    slow, lost = (row["id"] for row in world.archive[-2:])
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        sequence = world.store(slow, key=str(orders[0]), age_ms=2 * HOUR_MS, body=names[0])
        append(settings, "messages", [world.stored[-1]])
        known = len(world.actions)
        for group in (TICKETS, MAIL):
            world.done(slow, sequence, group, age_ms=2 * HOUR_MS)
        append(settings, "actions", world.actions[known:])
        world.write_tables(sqlite)

    summary = _run(settings, spark, pause=pause)

    assert waits == [settings.grace.confirm_after_seconds]
    assert summary.windows is not None
    assert summary.windows.resolved == 2, "the message and its business row"
    findings = {(row["message_id"], row["rule"], row["confirmed"]) for row in _tables(settings, "verdicts")}
    assert {one for one in findings if one[1] not in PLAIN} == {(lost, "not_in_broker", True)}
    assert summary.sentence == "Not balanced: 1 lost."


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
    right = Reader.now_ms
    monkeypatch.setattr(Reader, "now_ms", lambda one: right(one) - behind_ms * ("slow" in str(one.place)))

    summary = _run(replace(settings, inboxes=[InboxSource(group=TICKETS, url=slow.url)]), spark)

    assert summary.balanced
    assert len(summary.clock_sentences) == 1


@pytest.mark.spark
@pytest.mark.slow
def test_a_run_that_is_killed_and_started_again_gives_the_same_tables(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world(6)
    plant_all(world)
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    writes: list[str] = []
    undisturbed = replace(settings, output=tmp_path / "undisturbed")
    run_windows(undisturbed, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait, checkpoint=writes.append)
    wanted = _rows_of_windows(undisturbed)

    for number in (writes.index("write business_verdicts"), writes.index("show index")):
        killed = replace(settings, output=tmp_path / f"killed-{number}")
        with pytest.raises(Killed):
            run_windows(
                killed, since_ms=SINCE_MS, now_ms=NOW_MS, session=spark, pause=no_wait, checkpoint=_kill_at(number)
            )
        _run(killed, spark)
        assert _rows_of_windows(killed) == wanted, writes[number]
        assert _versions(killed) == _versions(undisturbed)


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


def test_an_output_folder_has_one_writer(sqlite: Database, tmp_path: Path) -> None:
    from spark_reconcile.runs.full_run import only_run

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


def _run(
    settings: Settings, spark: SparkSession, *, now_ms: int = NOW_MS, pause: Any = no_wait, full: bool = False,
    since_ms: int = SINCE_MS,
) -> Summary:  # fmt: skip
    return run_windows(settings, since_ms=since_ms, now_ms=now_ms, session=spark, pause=pause, full=full)


def _world(balanced: int) -> World:
    world = World()
    world.groups()
    for number in range(balanced):
        world.settled(age_ms=4 * HOUR_MS - number * 2 * MINUTE_MS)
    return world


def _done(world: World, message: str, *, key: str, age_ms: int) -> None:
    """A message that went all the way; its business row is another's matter."""
    sequence = world.store(world.sent(message, key=key, age_ms=age_ms), key=key, age_ms=age_ms)
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=age_ms)


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
    return sorted((row["at_ms"], row["rows"]) for row in rows if row["rule"] == "no_key")


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


def _rows_of_windows(settings: Settings) -> set[tuple[Any, ...]]:
    """Every verdict that is not plainly settled."""
    return _unsettled(_tables(settings, "verdicts"), _tables(settings, "business_verdicts"))


def _rows_of_run(summary: Summary) -> set[tuple[Any, ...]]:
    """The same of a whole run, of hours that are over."""
    folder = Path(summary.folder)
    closed = [row for row in pq.read_table(folder / "verdicts").to_pylist() if _hour(row) <= LATEST]
    business = pq.read_table(folder / "business_verdicts").to_pylist()
    return _unsettled(closed, [row for row in business if row["at_ms"] < LATEST + HOUR_MS])


def _unsettled(rows: list[dict[str, Any]], business: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    found = {
        (row["scope"], row["message_id"], row["consumer_group"], row["rule"], row["state"])
        for row in rows
        if row["rule"] not in PLAIN
    }
    return found | {
        ("business", row["message_key"], row["business_rule"], row["rule"], row["state"])
        for row in business
        if row["rule"] not in PLAIN
    }


def _books(summary: Summary) -> Counter[tuple[str, str, str, str]]:
    found: Counter[tuple[str, str, str, str]] = Counter()
    for book in summary.books:
        found[book.scope.value, book.topic, book.of, book.rule] += book.count
    return found


def _books_of_tables(summary: Summary) -> Counter[tuple[str, str, str, str]]:
    folder = Path(summary.folder)
    found: Counter[tuple[str, str, str, str]] = Counter()
    for row in pq.read_table(folder / "verdicts").to_pylist():
        if _hour(row) <= LATEST:
            found[row["scope"], row["topic"] or "", row["consumer_group"] or "", row["rule"]] += 1
    for row in pq.read_table(folder / "business_verdicts").to_pylist():
        if row["at_ms"] < LATEST + HOUR_MS:
            found["business", row["topic"], row["business_rule"], row["rule"]] += row["rows"]
    return found


def _hour(row: dict[str, Any]) -> int:
    time_ms = row["published_ms"] or row["stored_ms"] or row["at_ms"]
    return int(time_ms) // HOUR_MS * HOUR_MS
