"""Hours that a source was purged of before they were judged are told, with what to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spark_reconcile import Settings, Summary, run_windows
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.report.prometheus import metrics_text
from spark_reconcile.results.evidence_retention import first_looked_at_late, reaches, unjudged, with_notes
from spark_reconcile.results.summary import InputExtent, UnjudgedHours
from spark_reconcile.results.window_store import Window
from tests.fixtures.databases import Database
from tests.spark_reconcile.world import NOW_MS, World, no_wait

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARCHIVE = "archive sent messages"
LATEST = NOW_MS // HOUR_MS * HOUR_MS - HOUR_MS


@pytest.mark.spark
def test_hours_that_the_archive_was_purged_of_before_any_run_judged_them_are_told(
    spark: SparkSession, sqlite: Database, tmp_path: Path
) -> None:
    world = World()
    world.groups()
    world.settled()
    settings = replace(world.write(sqlite, tmp_path), archive_days=6 / 24)
    later_ms = NOW_MS + 9 * HOUR_MS

    first = _run(settings, spark, since_ms=NOW_MS - 3 * HOUR_MS, now_ms=NOW_MS)
    second = _run(settings, spark, since_ms=NOW_MS + 6 * HOUR_MS, now_ms=later_ms)
    third = _run(settings, spark, since_ms=NOW_MS - HOUR_MS, now_ms=later_ms)

    assert {one.hours for one in first.unjudged} == {0}
    judged = json.loads((settings.output / "judged.json").read_text())
    needed_ms = LATEST + 10 * HOUR_MS - settings.grace.slack_seconds * 1000
    assert (judged["written_at_ms"], judged["needed_since_ms"]["archive"]) == (later_ms, needed_ms)
    for summary in (second, third):
        assert [one for one in summary.unjudged if one.hours] == [
            UnjudgedHours(
                source="archive", what="sent messages", hours=4, open_hours=0, since_ms=LATEST + HOUR_MS,
                until_ms=LATEST + 5 * HOUR_MS,
            )
        ]  # fmt: skip
        assert summary.balanced
        assert summary.sentence.endswith("Purged before they were judged: 4 hours of the archive (sent messages).")
        (note,) = [one.note for one in summary.inputs if one.source == "archive"]
        assert "4 hours went before they were judged: run more often, or keep the archive for longer" in note
        assert "--archive-days" in (Path(summary.folder) / "report.html").read_text()
    assert f'recon_expired_hours{{source="{ARCHIVE}",judged="never"}} 4\n' in metrics_text(second)
    assert third.windows is not None
    assert third.windows.windows == 10


def test_an_hour_counts_once_it_is_gone_as_a_whole_and_never_if_no_run_saw_it_there() -> None:
    shown = {0: _window(), HOUR_MS: _window()}
    purged = [_input("archive", 4 * HOUR_MS - 1)]

    def hours(begun_ms: int) -> int:
        (found,) = unjudged([0, HOUR_MS], shown, {ARCHIVE: begun_ms}, inputs=purged)
        return found.hours

    assert [hours(begun_ms) for begun_ms in (0, HOUR_MS, 2 * HOUR_MS, 2 * HOUR_MS + 1, 9 * HOUR_MS)] == [1, 1, 1, 0, 0]
    assert unjudged([0], {0: _window()}, {}, inputs=purged)[0].hours == 0, "a source that is seen for the first time"


def test_an_hour_in_which_something_still_moved_is_told_apart() -> None:
    shown = {0: _window(), HOUR_MS: _window(is_open=True), 2 * HOUR_MS: _window(), 3 * HOUR_MS: _window(is_open=True)}
    inputs = [_input("archive", 3 * HOUR_MS), _input("outbox", 9 * HOUR_MS), _input("inbox", None)]

    found = unjudged([2 * HOUR_MS], shown, {ARCHIVE: 0}, inputs=inputs)

    assert found == [
        UnjudgedHours(
            source="archive", what="sent messages", hours=0, open_hours=1, since_ms=HOUR_MS, until_ms=2 * HOUR_MS
        )
    ]  # fmt: skip
    notes = [one.note for one in with_notes(inputs, found)]
    assert "1 hours went while something in them still moved: let --since" in notes[0]
    assert notes[1:] == ["", ""]


def test_an_hour_that_was_judged_in_time_stays_so_when_it_is_judged_again() -> None:
    shown = {0: _window(), HOUR_MS: _window(late=[ARCHIVE])}
    now = reaches([_input("archive", 5 * HOUR_MS), _input("business", 7 * HOUR_MS), _input("inbox", None)])

    late = first_looked_at_late([0, HOUR_MS, 2 * HOUR_MS, 6 * HOUR_MS], shown, {ARCHIVE: 0}, now)

    assert now == {ARCHIVE: 5 * HOUR_MS}
    assert late == {0: [], HOUR_MS: [ARCHIVE], 2 * HOUR_MS: [ARCHIVE], 6 * HOUR_MS: []}
    assert first_looked_at_late([0], {}, {ARCHIVE: 0}, now) == {0: []}, "nothing was judged here before"


def _run(settings: Settings, spark: SparkSession, *, since_ms: int, now_ms: int) -> Summary:
    return run_windows(settings, since_ms=since_ms, now_ms=now_ms, session=spark, pause=no_wait)


def _input(source: str, reach_ms: int | None) -> InputExtent:
    what: Any = {"archive": "sent messages"}.get(source, "rows")
    return InputExtent(source=source, what=what, rows=0, first_ms=0, last_ms=0, complete_since_ms=reach_ms)


def _window(*, is_open: bool = False, late: list[str] | None = None) -> Window:
    return Window(fingerprint="f", version="v", judged_at_ms=0, open=is_open, result={}, late=late or [])
