"""Verdicts on cancels: what became of one is judged in the hour of its row, and of its message in the message's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from outbox_core.journal import journal
from spark_reconcile import Settings, Summary, run, run_windows
from spark_reconcile.repair.apply import apply_repairs
from spark_reconcile.repair.plan import RepairAction, confirmed_suspects, hour_folders, plan_repairs
from spark_reconcile.results.window_store import WindowStore
from tests.fixtures.databases import Database, sqlite_database
from tests.spark_reconcile.timed_ids import with_timed_ids
from tests.spark_reconcile.world import HOUR_MS, MAIL, MINUTE_MS, NOW_MS, REMINDER, World, append, archived, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINCE_MS = NOW_MS - 5 * HOUR_MS
TAKEN = "canceled"
HANDED_OUT = ("answered in the table", "answered in files")
"""Messages that were handed out though their cancel was answered."""
CANCELS = {
    "on its topic": ([REMINDER], (REMINDER,)),
    "before it came": ([""], ("order.*", REMINDER)),
    "before it came, on all": ([""], None),
    "on another topic": (["lim.a"], ("lim.*",)),
    "on others before it came": ([""], ("lim.*", "x.?")),
}
"""Topics and scopes of cancels, by the names of messages that never fell due."""
NOTED = {"noted": ([REMINDER], (REMINDER,)), "noted of another": (["lim.a"], ("lim.*",))}
"""Cancels whose own archive has the broker's answer that they were taken."""
NOT_CANCELED = {"on another topic", "on others before it came"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Runs by the hour before and behind the answers to cancels, one of them noted by the broker between both looks."""

    settings: Settings
    before: Summary
    before_found: set[tuple[str, str, str]]
    summary: Summary
    whole: Summary
    """A whole run on the last records."""
    ids: dict[str, str]
    """Ids of messages and cancels, by their names."""


@pytest.fixture(scope="module")
def answered(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    folder = tmp_path_factory.mktemp("answered")
    database, world = sqlite_database(folder), _world()
    for name in HANDED_OUT:
        world.done(name, _reminded(world, name, age_ms=4 * HOUR_MS), MAIL, age_ms=3 * HOUR_MS, topic=REMINDER)
    world.sent("scheduled", key=None, topic="newsletter", age_ms=2 * HOUR_MS, deliver_at_ms=NOW_MS + HOUR_MS)
    world.store("scheduled", key=None, topic="newsletter", age_ms=2 * HOUR_MS, deliver_at_ms=NOW_MS + HOUR_MS,
                scheduled=True)  # fmt: skip
    for name, (topics, scope) in (CANCELS | NOTED).items():
        _never_fired(world, name)
        world.actions.append(journal.Canceled(at_ms=NOW_MS - 3 * HOUR_MS, ids=[name], topics=topics, scope=scope))
    for name in NOTED:
        world.sent_cancel(f"cancel {name}", name, TAKEN, age_ms=3 * HOUR_MS)
    answers = [("noted late", "scheduled", TAKEN), ("forgotten", "of no message here", TAKEN)]
    answers += [(f"broken {name}", name, TAKEN) for name in HANDED_OUT]
    answers += [(f"too late {name}", name, "too_late") for name in HANDED_OUT]
    for name, of, answer in answers:
        world.sent_cancel(name, of, answer, age_ms=2 * HOUR_MS)
    names = [row["id"] for row in world.archive]
    with_timed_ids(world)
    ids = dict(zip(names, (row["id"] for row in world.archive), strict=True))
    come_later, world.archive = world.archive[-len(answers) :], world.archive[: -len(answers)]
    settings = world.write(database, folder)
    before = _run(settings, spark)
    before_found = _found(settings)

    moved = {ids[name] for name in ids if name.endswith("answered in files")} - {ids["answered in files"]}
    in_files = [row for row in come_later if row["id"] in moved]
    world.archive += [row for row in come_later if row not in in_files]
    world.write_tables(database)
    settings = archived(settings, folder / "archive", in_files)

    def note(_: float) -> None:
        append(settings, "actions", [journal.Canceled(at_ms=NOW_MS, ids=[ids["scheduled"]], topics=[""])])

    summary = _run(settings, spark, now_ms=NOW_MS + MINUTE_MS, pause=note)
    whole = run(replace(settings, output=folder / "whole"), session=spark, now_ms=NOW_MS + MINUTE_MS)
    return Answered(
        settings=settings, before=before, before_found=before_found, summary=summary, whole=whole, ids=ids
    )  # fmt: skip


@pytest.mark.spark
def test_a_cancel_settles_the_message_of_its_topics_and_no_other_of_its_id(answered: Answered) -> None:
    names = {answered.ids[name]: name for name in (*CANCELS, *NOTED, *(f"cancel {name}" for name in NOTED))}

    rules = {(names[one], rule) for one, _, rule in answered.before_found}

    assert rules == {
        *((name, "not_fired" if name in NOT_CANCELED else "canceled") for name in CANCELS),
        *((name, "canceled") for name in NOTED),
        ("cancel noted", "cancel_accepted"),
        ("cancel noted of another", "cancel_not_noted"),
    }
    assert answered.before.sentence == "Not balanced: 1 lost."
    assert answered.before_found <= _found_in(answered.whole)


@pytest.mark.spark
def test_verdicts_on_cancels_are_those_of_a_whole_run(answered: Answered) -> None:
    assert _found(answered.settings) == _found_in(answered.whole)


@pytest.mark.spark
@pytest.mark.parametrize("message", HANDED_OUT)
def test_an_answer_that_comes_later_opens_the_hour_of_the_message_that_was_handed_out_all_the_same(
    answered: Answered, message: str
) -> None:
    ids, summary = answered.ids, answered.summary
    broken, too_late = ids[f"broken {message}"], ids[f"too late {message}"]

    assert summary.windows is not None
    assert summary.windows.judged == 2
    assert {one for one in _found(answered.settings) if one[0] in {ids[message], broken, too_late}} == {
        (ids[message], "", "canceled"), (ids[message], MAIL, "delivered_after_cancel"),
        (broken, "", "cancel_not_noted"), (too_late, "", "cancel_without_effect"),
    }  # fmt: skip
    (lost,) = [one for one in summary.examples if one.id == broken]
    assert (lost.rule, lost.key, lost.topic) == ("cancel_not_noted", ids[message], "(cancels)")


@pytest.mark.spark
def test_a_note_that_comes_by_the_second_look_clears_its_cancel(answered: Answered) -> None:
    asked = {answered.ids[name]: name for name in ("scheduled", "noted late", "forgotten")}

    found = {(asked[one], of, rule) for one, of, rule in _found(answered.settings) if one in asked}

    assert answered.summary.windows is not None
    assert answered.summary.windows.resolved == 1
    assert found == {
        ("scheduled", "", "canceled"), ("noted late", "", "cancel_accepted"), ("forgotten", "", "cancel_not_noted")
    }  # fmt: skip


@pytest.mark.spark
def test_a_cancel_that_was_not_sent_is_told_whatever_its_age_and_made_due_by_a_repair(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = _world()
    world.unsent_cancel("of the span", "a message", age_ms=2 * HOUR_MS)
    world.unsent_cancel("of last week", "a message", age_ms=200 * HOUR_MS)
    world.unsent_cancel("refused", "a message", age_ms=2 * HOUR_MS, state="parked")
    far_us = (NOW_MS + 365 * 24 * HOUR_MS) * 1000
    for row in world.outbox:
        row["due_at_us"] = far_us
    with_timed_ids(world)
    settings = world.write(sqlite, tmp_path)
    of_span, older, refused = (row["id"] for row in world.outbox)

    summary = _run(settings, spark)
    suspects = confirmed_suspects(hour_folders(settings.output, since_ms=SINCE_MS, until_ms=NOW_MS))
    repairs = plan_repairs(settings, suspects, repairs_max=10)
    done = apply_repairs(repairs)

    assert summary.sentence == "Not balanced: 2 unsent."
    assert {one.id: one.rule for one in summary.examples} == {
        of_span: "not_sent", older: "not_sent", refused: "parked"
    }  # fmt: skip
    assert [(one.message_id, one.action) for one in repairs] == [(of_span, RepairAction.MAKE_DUE)]
    assert done == repairs
    assert _due(sqlite)[of_span] < far_us == _due(sqlite)[refused]


def _world() -> World:
    world = World()
    world.groups()
    for number in range(6):
        world.settled(age_ms=4 * HOUR_MS - number * MINUTE_MS)
    return world


def _reminded(world: World, message: str, *, age_ms: int) -> int:
    """A scheduled message that fell due an hour after it was made; its sequence."""
    due_ms = NOW_MS - age_ms + HOUR_MS
    order = world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=age_ms)
    world.sent(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=age_ms)
    world.store(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=age_ms)
    return world.fire(message, age_ms=age_ms - HOUR_MS)


def _never_fired(world: World, message: str) -> None:
    """A scheduled message that was due two hours ago, and that never fell due."""
    due_ms = NOW_MS - 2 * HOUR_MS
    order = world.order(status="BOOKED", remind_at_ms=due_ms, age_ms=4 * HOUR_MS)
    world.sent(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, age_ms=4 * HOUR_MS)
    world.store(message, key=str(order), topic=REMINDER, deliver_at_ms=due_ms, scheduled=True, age_ms=4 * HOUR_MS)


def _run(settings: Settings, spark: SparkSession, *, now_ms: int = NOW_MS, pause: Any = no_wait) -> Summary:
    return run_windows(settings, since_ms=SINCE_MS, now_ms=now_ms, session=spark, pause=pause)


def _found(settings: Settings) -> set[tuple[str, str, str]]:
    store = WindowStore(settings.output)
    folders = [store.folder(start) / "verdicts" for start in store.windows]
    return set().union(*(_unsettled(folder) for folder in folders if folder.exists()))


def _found_in(whole: Summary) -> set[tuple[str, str, str]]:
    return _unsettled(Path(whole.folder) / "verdicts")


def _unsettled(folder: Path) -> set[tuple[str, str, str]]:
    rows = pq.read_table(folder).to_pylist()
    found = {(row["message_id"], row["consumer_group"] or "", row["rule"]) for row in rows}
    return {one for one in found if one[2] not in {"stored", "done"}}


def _due(database: Database) -> dict[str, int]:
    table = f"{database.schema}.message" if database.schema else "outbox_message"
    engine = create_engine(database.url)
    try:
        with engine.connect() as connection:
            return {row.id: row.due_at_us for row in connection.execute(text(f"SELECT id, due_at_us FROM {table}"))}
    finally:
        engine.dispose()
