"""A cause that explains many findings is stated once: where a source ends or begins, and times that are off alike."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_reconcile import BusinessRule, Condition, Settings, Summary, run, run_windows
from spark_reconcile.diagnosis.common_causes import (
    Offset,
    OutOfRangeFindings,
    RuleExtent,
    extent_causes,
    extents_of,
    key_causes,
    offset_causes,
    shared_offset_ms,
)
from spark_reconcile.diagnosis.diagnosis import rule_matches
from spark_reconcile.results.summary import Cause, InputExtent, VerdictCount
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from spark_reconcile.runs.stored_results import stored_run
from tests.fixtures.databases import Database, sqlite_database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import (
    HOUR_MS,
    MAIL,
    MINUTE_MS,
    NOW_MS,
    PAID,
    REMINDER,
    SECOND_MS,
    TICKETS,
    World,
    no_wait,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, LOST = 30, 110
OPENED = "order.opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class BothRuns:
    """A whole run, and one by the hour, on a log that lost its end and business times in local time."""

    settings: Settings
    whole: Summary
    hourly: Summary


@pytest.fixture(scope="module")
def both(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> BothRuns:
    folder = tmp_path_factory.mktemp("both")
    world = World()
    world.groups()
    for number in range(20):
        world.settled(age_ms=4 * HOUR_MS - number * MINUTE_MS)
    for number in range(LOST):
        age_ms = 3 * HOUR_MS - number * 30 * SECOND_MS
        world.sent(f"lost-{number}", key=str(world.order(age_ms=age_ms)), age_ms=age_ms)
    _in_local_time(world, status="BOOKED", topic=REMINDER, minutes=330)
    _in_local_time(world, status="OPEN", topic=OPENED, minutes=-480)
    with_timed_ids(world)
    settings = world.write(sqlite_database(folder), folder)
    paid, reminded = settings.rules
    opened = replace(
        paid, name="openings are announced", where=[Condition(column="status", values=("OPEN",))], topic=OPENED
    )
    settings = replace(settings, rules=[paid, replace(reminded, deliver_at_column=None), opened])
    whole = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)
    hourly = run_windows(replace(settings, output=folder / "hourly"), since_ms=NOW_MS - 5 * HOUR_MS, now_ms=NOW_MS,
                         session=spark, pause=no_wait)  # fmt: skip
    return BothRuns(settings=settings, whole=whole, hourly=hourly)


@pytest.mark.spark
def test_losses_behind_the_end_of_the_log_have_one_cause_by_the_hour_and_as_a_whole(both: BothRuns) -> None:
    assert both.whole.sentence == f"Not balanced: {LOST} lost."
    assert both.hourly.sentence == f"Not balanced: {LOST} lost, {2 * ROWS} phantom."
    end_ms = NOW_MS - 4 * HOUR_MS + 19 * MINUTE_MS + 10
    (of_whole,), (of_hours, *_) = both.whole.causes, both.hourly.causes
    for cause in (of_whole, of_hours):
        assert (cause.source, cause.what, cause.count) == ("broker", "message log", LOST)
        assert cause.sentence == (
            f"All 110 findings are after {_moment(end_ms)}, where the broker (message log) ends: 110 not_in_broker."
        )
    _is_shown_first(both.whole, both.settings)


@pytest.mark.spark
def test_a_database_whose_clock_was_180_s_behind_and_a_column_in_local_time_are_causes(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    for number in range(ROWS):
        _reminded(world, f"local-{number}", age_ms=4 * HOUR_MS - number * MINUTE_MS)
        _handled(world, f"behind-{number}", age_ms=2 * HOUR_MS - number * MINUTE_MS)
    behind_us = 180 * SECOND_MS * 1000
    for row in (*world.archive, *world.inbox):
        row.update(
            {name: row[name] - behind_us for name in ("created_at_us", "sent_at_us", "handled_at_us") if name in row}
        )
    for order in world.orders:
        order["remind_at_us"] = order["remind_at_us"] and order["remind_at_us"] + 330 * MINUTE_MS * 1000
    settings = world.write(sqlite, tmp_path)

    summary = run(settings, session=spark, now_ms=NOW_MS, pause=no_wait)

    assert summary.sentence == f"Not balanced: {ROWS} early, {ROWS} mismatch."
    inbox, column = sorted(summary.causes, key=lambda cause: cause.source, reverse=True)
    assert (inbox.source, inbox.what, inbox.count) == ("inbox", TICKETS, ROWS)
    assert inbox.size_ms == pytest.approx(-180 * SECOND_MS, abs=SECOND_MS)
    assert inbox.sentence == (
        f"The times of the inbox (tickets) are 180 s behind the broker's, in 95 % or more of {ROWS} rows that were "
        f"compared: the database's clock was wrong when they were written. It may explain {ROWS} handled_early."
    )
    assert (column.source, column.what, column.size_ms) == ("business", "travellers are reminded", 330 * MINUTE_MS)
    assert "remind_at_us" in column.sentence
    assert "it looks like UTC+05:30, local time where UTC is expected" in column.sentence
    assert column.sentence.endswith(f"It may explain {ROWS} due_time_differs.")


@pytest.mark.spark
def test_business_rows_whose_time_column_is_in_local_time_are_found_in_other_hours_and_are_a_cause(
    both: BothRuns,
) -> None:
    _, *columns = both.hourly.causes

    assert len(columns) == 2
    by_rule = {column.what: column for column in columns}
    for rule, minutes, offset, zone in (
        ("travellers are reminded", 330, "19,800 s ahead of", "UTC+05:30"),
        ("openings are announced", -480, "28,800 s behind", "UTC-08:00"),
    ):
        column = by_rule[rule]
        assert (column.source, column.count, column.size_ms) == ("business", ROWS, minutes * MINUTE_MS)
        assert f"The times in paid_at_us ({rule}) are {offset} their messages'" in column.sentence
        assert f"it looks like {zone}, local time" in column.sentence
        assert column.sentence.endswith(f"It may explain {ROWS} no_business_row.")


def test_findings_outside_of_a_source_are_a_cause_where_nearly_all_lie_on_one_side() -> None:
    log = _extent("not_in_broker", source="broker", what="message log")
    foreign = _extent("handled_never_stored", source="broker", what="message log", scope=Scope.DELIVERY)
    empty = replace(_extent("acknowledged_not_handled", source="inbox", what="g", scope=Scope.DELIVERY), rows=0)

    found = extent_causes([
        OutOfRangeFindings(extent=replace(log, of="a"), findings=600, before=0, after=600),
        OutOfRangeFindings(extent=replace(log, of="b"), findings=400, before=0, after=380),
        OutOfRangeFindings(extent=foreign, findings=100, before=0, after=95),
        OutOfRangeFindings(extent=empty, findings=200, before=0, after=0),
    ])  # fmt: skip

    assert found == [
        Cause(
            sentence="1,075 of 1,100 findings are after 1970-01-01 14:00:00 UTC, where the broker (message log) ends: "
            "980 not_in_broker, 95 handled_never_stored.",
            source="broker", what="message log", count=1_075,
        ),
        Cause(sentence="The inbox (g) gave no row: 200 acknowledged_not_handled.", source="inbox", what="g", count=200),
    ]  # fmt: skip
    (before,) = extent_causes([OutOfRangeFindings(extent=log, findings=100, before=100, after=0)])
    assert before.sentence == (
        "All 100 findings are before 1970-01-01 08:00:00 UTC, where the broker (message log) begins: 100 not_in_broker."
    )
    for few in (
        OutOfRangeFindings(extent=log, findings=99, before=0, after=99),
        OutOfRangeFindings(extent=log, findings=100, before=0, after=94),
        OutOfRangeFindings(extent=log, findings=100, before=50, after=50),
    ):  # fmt: skip
        assert extent_causes([few]) == []


def test_only_rules_with_many_findings_are_held_against_the_sources_that_they_depend_on() -> None:
    verdict_counts = [_count("not_in_broker", 99), _count("unrecorded", 100), _count("body_differs", 5_000)]
    inputs = [
        InputExtent(source="broker", what="message log", rows=1, first_ms=1, last_ms=2, complete_since_ms=0),
        InputExtent(source="archive", what="sent messages", rows=1, first_ms=3, last_ms=4, complete_since_ms=0),
    ]

    (extent,) = extents_of(verdict_counts, inputs, [])

    assert (extent.rule, extent.source, extent.first_ms, extent.last_ms) == ("unrecorded", "archive", 3, 4)
    assert [one.rule for one in extents_of([*verdict_counts, _count("not_in_broker", 1)], inputs, [])] == [
        "not_in_broker", "unrecorded"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("percentiles_ms", "rows", "found"),
    [
        ([-180_000] * 201, 20, -180_000), ([-180_000] * 201, 19, None), ([900] * 201, 500, None),
        ([0] * 10 + [60_000] * 191, 500, 60_000), ([0] * 11 + [60_000] * 190, 500, None),
        (list(range(0, 201_000, 1_000)), 500, None),
    ],
    ids=["shared", "too few rows", "within the skew", "nearly all", "not enough", "spread"],
)  # fmt: skip
def test_an_offset_is_shared_by_nearly_all_rows(percentiles_ms: list[int], rows: int, found: int | None) -> None:
    assert shared_offset_ms(percentiles_ms, rows=rows, skew_ms=1_000) == found


def test_tables_that_one_wrong_clock_wrote_are_one_cause_and_a_zone_is_named_of_columns_alone() -> None:
    clock = Offset(
        name="the times of the archive", reference="the broker's", source="archive", what="sent messages",
        size_ms=3_600_000, rows=40, explains={"sent_in_grace": 20}, is_clock=True,
    )  # fmt: skip
    inbox = replace(clock, name="the times of the inbox (g)", source="inbox", what="g", size_ms=3_600_500,
                    explains={"effect_in_grace": 30})  # fmt: skip
    column = replace(clock, name="the times in paid_at (paid)", reference="their messages'", source="business",
                     what="paid", size_ms=-28_800_000, is_clock=False)  # fmt: skip

    one, other = offset_causes([clock, column, inbox], skew_ms=1_000)
    (odd,) = offset_causes([replace(column, size_ms=100_000)], skew_ms=1_000)

    assert one.sentence == (
        "The times of the archive and the times of the inbox (g) are 3,600 s ahead of the broker's, in 95 % or more of "
        "80 rows that were compared: the database's clock was wrong when they were written. It may explain 20 "
        "sent_in_grace, 30 effect_in_grace."
    )
    assert one.count == 50
    assert "28,800 s behind their messages'" in other.sentence
    assert "UTC-08:00" in other.sentence
    assert "it is constant" in odd.sentence


def _in_local_time(world: World, *, status: str, topic: str, minutes: int) -> None:
    """Orders with a message each, all before the log ends; their times are in a zone this many minutes ahead."""
    for number in range(ROWS):
        age_ms = 4 * HOUR_MS - number * 30 * SECOND_MS
        key = str(world.order(age_ms=age_ms, status=status))
        world.orders[-1]["paid_at_us"] += minutes * MINUTE_MS * 1000
        message = world.sent(f"{topic}-{number}", key=key, topic=topic, age_ms=age_ms)
        sequence = world.store(message, key=key, topic=topic, age_ms=age_ms)
        if topic == REMINDER:
            world.done(message, sequence, MAIL, age_ms=age_ms, topic=topic)


def _reminded(world: World, message: str, *, age_ms: int) -> None:
    """A trip of which its traveller was reminded, as asked."""
    due_ms = NOW_MS - age_ms + 10 * MINUTE_MS
    key = str(world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=age_ms))
    world.sent(message, key=key, topic=REMINDER, deliver_at_ms=due_ms, age_ms=age_ms)
    world.store(message, key=key, topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=age_ms)
    sequence = world.fire(message, age_ms=age_ms - 10 * MINUTE_MS)
    world.done(message, sequence, MAIL, age_ms=age_ms - 10 * MINUTE_MS, topic=REMINDER)


def _handled(world: World, message: str, *, age_ms: int) -> None:
    """A scheduled message that was handed out and handled when it was due."""
    due_age_ms = age_ms - 10 * MINUTE_MS
    key = str(world.order(age_ms=age_ms))
    world.sent(message, key=key, deliver_at_ms=NOW_MS - due_age_ms, age_ms=age_ms)
    world.store(message, key=key, deliver_at_ms=NOW_MS - due_age_ms, scheduled=True, age_ms=age_ms)
    sequence = world.fire(message, age_ms=due_age_ms, topic=PAID)
    for group in (TICKETS, MAIL):
        world.done(message, sequence, group, age_ms=due_age_ms)


def _is_shown_first(summary: Summary, settings: Settings) -> None:
    """In the numbers, on the page, and as it was when it is read back."""
    folder, sentence = Path(summary.folder), summary.causes[0].sentence
    numbers = json.loads((folder / "run.json").read_text())
    assert next(iter(numbers)) == "causes"
    assert numbers["causes"][0]["sentence"] == sentence
    page = (folder / "report.html").read_text()
    assert 0 < page.index(sentence) < page.index(f"<h1>{summary.sentence}")
    assert stored_run(settings.output).causes == summary.causes


def _extent(rule: str, *, source: str, what: str, scope: Scope = Scope.MESSAGE) -> RuleExtent:
    return RuleExtent(scope=scope, rule=rule, of="", source=source, what=what, rows=9, first_ms=8 * HOUR_MS,
                  last_ms=14 * HOUR_MS)  # fmt: skip


def _count(rule: str, count: int) -> VerdictCount:
    return VerdictCount(
        scope=Scope.MESSAGE, topic="t", of="", state=State.LOST, severity=Severity.FINDING, rule=rule, count=count
    )


def _moment(time_ms: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _counted(scope: Scope, topic: str, of: str, rule: str, count: int) -> VerdictCount:
    return VerdictCount(
        scope=scope, topic=topic, of=of, state=State.LOST, severity=Severity.FINDING, rule=rule, count=count
    )  # fmt: skip


@pytest.mark.parametrize(
    ("announced", "lost", "stored", "unasked", "rules", "is_cause"),
    [
        (0, 40, 0, 38, 1, True),
        (0, 40, 0, 38, 2, False),  # another rule's rows may ask for them
        (1, 40, 0, 38, 1, False),
        (0, 40, 1, 38, 1, False),
        (0, 4, 0, 38, 1, False),
        (0, 40, 0, 4, 1, False),
    ],
)
def test_a_rule_none_of_whose_rows_matches_any_message_is_one_cause_and_the_first(
    announced: int, lost: int, stored: int, unasked: int, rules: int, is_cause: bool
) -> None:
    rule = BusinessRule(name="orders", table="t", key_column="order_no", time_column="at", topic=PAID)
    counts = [
        _counted(Scope.BUSINESS, PAID, "orders", "announced", announced),
        _counted(Scope.BUSINESS, PAID, "orders", "no_message", lost),
        _counted(Scope.MESSAGE, PAID, "", "stored", stored),
        _counted(Scope.MESSAGE, PAID, "", "no_business_row", unasked),
        _counted(Scope.MESSAGE, OPENED, "", "stored", 7), _counted(Scope.BUSINESS, OPENED, "others", "announced", 7),
    ]  # fmt: skip

    causes = key_causes(rule_matches(counts, [rule, *[replace(rule, name="more")] * (rules - 1)]))

    assert [one.count for one in causes] == [lost + unasked] * is_cause
    for cause in causes:
        assert "None of 40 rows of the rule 'orders' has the key of any of 38 messages" in cause.sentence
        assert "order_no" in cause.sentence
