"""The report made anew from what runs left: the same page, of a run or of the hours of many, and nothing is judged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Grace, Settings, Summary
from spark_reconcile.cli.run_command import app
from spark_reconcile.core.time_buckets import TimeAxis
from spark_reconcile.report.writer import publish
from spark_reconcile.results.latencies import Hop, Hour, keep_hours
from spark_reconcile.results.output_folder import staging
from spark_reconcile.results.summary import (
    Cause,
    Example,
    Flow,
    InputExtent,
    Latency,
    UnjudgedHours,
    VerdictCount,
    WindowCounts,
)
from spark_reconcile.results.window_store import Window, WindowStore
from spark_reconcile.results.window_totals import Tally
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from spark_reconcile.runs.stored_results import stored_hours, stored_run

HOUR_MS = 3_600_000
NOW_MS = 500_000 * HOUR_MS


def test_a_stored_run_reads_back_as_it_was_and_gives_the_same_page(tmp_path: Path) -> None:
    published = _published(tmp_path / "out")
    page = Path(published.folder) / "report.html"
    before = page.read_text()
    page.unlink()

    made = _report("--output", str(tmp_path / "out"))

    assert stored_run(tmp_path / "out") == published
    assert page.read_text() == before
    assert made.exit_code == 0
    assert made.stdout == f"Cause: It ends.\n{published.sentence}\nreport: {page}\n"


def test_the_newest_run_is_taken_unless_one_is_named_wherever_the_folder_stands_by_now(tmp_path: Path) -> None:
    first = _published(tmp_path / "out")
    second = _published(tmp_path / "out", lost=7)
    shutil.move(tmp_path / "out", tmp_path / "kept")

    newest, named = (json.loads(_report("--output", str(tmp_path / "kept"), "--json", *options).stdout)
                     for options in ([], ["--run", first.run_id]))  # fmt: skip

    assert (newest["run_id"], newest["lost"]) == (second.run_id, 7)
    assert (named["run_id"], named["lost"]) == (first.run_id, 2)
    assert newest["folder"] == str(tmp_path / "kept" / second.run_id)


def test_a_page_is_made_of_a_run_that_noted_less(tmp_path: Path) -> None:
    published = _published(tmp_path / "out")
    path = Path(published.folder) / "run.json"
    numbers = json.loads(path.read_text())
    for name in ("grace", "flow"):
        del numbers[name]
    for one in numbers["inputs"]:
        del one["complete_until_ms"]
    path.write_text(json.dumps(numbers))

    made = _report("--output", str(tmp_path / "out"), "--to", str(tmp_path / "here"))

    assert made.exit_code == 0
    page = (tmp_path / "here" / "report.html").read_text()
    assert published.sentence in page
    assert "is pending; a first hand-out" not in page
    assert json.loads((tmp_path / "here" / "run.json").read_text())["grace"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--run", "20250101T000000Z-ffffff"], "there is no run .* did you mean"),
        (["--run", "../elsewhere"], "there is no run '../elsewhere'"),
        (["--until", "2h"], "--until goes with --since"),
        (["--since", "2h", "--run", "a"], "name one of them"),
        (["--since", "2h"], "no hour of this span was judged"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_the_cure(tmp_path: Path, options: list[str], told: str) -> None:
    shutil.copytree(_published(tmp_path / "out").folder, tmp_path / "elsewhere")

    refused = _report("--output", str(tmp_path / "out"), *options)

    with pytest.raises(ConfigurationError, match=told):
        raise refused.exception or AssertionError(refused.stdout)


@pytest.mark.parametrize(("name", "text"), [("run.json", "{"), ("manifest.json", "[]")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    published = _published(tmp_path / "out")
    path = tmp_path / "out" / name if name == "manifest.json" else Path(published.folder) / name
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=f"{path} cannot be read"):
        stored_run(tmp_path / "out")


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder of results"):
        stored_run(tmp_path)
    assert "--output" in str(_report().exception)


def test_the_hours_of_many_runs_are_one_report_as_each_was_judged_last(tmp_path: Path) -> None:
    output = tmp_path / "out"
    for number, lost in ((0, 0), (1, 3), (3, 1)):
        _judged(output, NOW_MS + number * HOUR_MS, lost=lost, judged_at_ms=NOW_MS + (number + 2) * HOUR_MS)
    _judged(output, NOW_MS - 5 * HOUR_MS, lost=1, judged_at_ms=NOW_MS)
    hop = Hop(hop="commit to broker", topic="t", of="", longest_ms=9, steps={7: 3})
    keep_hours({NOW_MS: WindowStore(output).folder(NOW_MS)}, {NOW_MS: Hour(one_in=1, hops=[hop])})

    found = stored_hours(output, since_ms=NOW_MS, until_ms=NOW_MS + 4 * HOUR_MS)
    made = _report("--output", str(output), "--since", "2027-01-14T00:00:00Z", "--until", "2027-01-16T00:00:00Z")

    assert (found.messages, found.count(State.LOST), found.judged_at_ms) == (34, 4, NOW_MS + 5 * HOUR_MS)
    assert found.windows is not None
    assert (found.windows.windows, found.windows.not_closed, found.windows.earlier_findings) == (3, 1, 1)
    assert (found.windows.untimed, [(one.p50_ms, one.count) for one in found.latencies]) == (2, [(7, 3)])
    assert found.flow is not None
    assert sum(found.flow.trouble[State.LOST].values()) == 4
    assert [one.id for one in found.examples] == ["m-1", "m-3"]
    (late,) = found.unjudged
    assert (late.source, late.what, late.hours) == ("archive", "sent messages", 3)
    assert found.sentence.endswith("Purged before they were judged: 3 hours of the archive (sent messages).")
    assert made.exit_code == 0, made.exception
    page = (output / "hours" / "report.html").read_text()
    assert "Hours of several runs" in page
    assert "m-3" in page
    assert "Of 3 hours nobody noted how long it took" in page
    assert "were never judged" in made.stderr


def _judged(output: Path, start_ms: int, *, lost: int, judged_at_ms: int) -> None:
    """An hour with ten messages and so many that are lost."""
    tally = Tally()
    tally.add((Scope.MESSAGE, "order.paid", "", "stored"), 10)
    tally.add_totals(messages=10 + lost)
    if lost:
        tally.add((Scope.MESSAGE, "order.paid", "", "not_in_broker"), lost)
        tally.examples.append(replace(_example(), id=f"m-{(start_ms - NOW_MS) // HOUR_MS}", at_ms=start_ms))
    window = Window(fingerprint="f", version="v", judged_at_ms=judged_at_ms, open=False, result=tally.as_result(),
                    late=["archive sent messages"])  # fmt: skip
    store = WindowStore(output)
    store.staging()
    store.publish({start_ms: window})


def _published(output: Path, *, lost: int = 2) -> Summary:
    """A run whose numbers fill every part of the page."""
    settings = Settings(database_url="sqlite:///none", broker_data=output, output=output, grace=Grace(seconds=7))
    with staging(output, now_ms=NOW_MS) as stage:
        summary = Summary(
            run_id=stage.run_id, judged_at_ms=NOW_MS, business_rows=1, messages=12, message_groups=4, stored=10,
            delivered=4, redelivered=1, acknowledged=3, resent=1, deduplicated_by_broker=0, deduplicated_by_inbox=1,
            causes=[Cause(sentence="It ends.", source="broker", what="message log", count=lost)],
            verdict_counts=[VerdictCount(scope=Scope.MESSAGE, topic="t", of="", state=State.LOST,
                        severity=Severity.FINDING, rule="not_in_broker", count=lost)],
            latencies=[Latency(hop="commit to broker", topic="t", of="", count=9, p50_ms=3, p95_ms=5, p99_ms=8,
                               longest_ms=90)],
            examples=[_example()],
            inputs=[
                InputExtent(source="broker", what="message log", rows=10, first_ms=NOW_MS - HOUR_MS,
                            last_ms=NOW_MS - 9, complete_since_ms=0, note="torn"),
                InputExtent(source="archive", what="sent messages", rows=12, first_ms=NOW_MS - HOUR_MS,
                            last_ms=NOW_MS - 9, complete_since_ms=NOW_MS - 9 * HOUR_MS,
                            complete_until_ms=NOW_MS - 90_000),
            ],
            unjudged=[
                UnjudgedHours(source="archive", what="sent messages", hours=2, open_hours=1, since_ms=1, until_ms=9),
            ],
            folder=str(stage.final), clocks={"db": 3_000}, took_seconds={"read": 1.5}, grace=settings.grace,
            windows=WindowCounts(since_ms=NOW_MS - HOUR_MS, until_ms=NOW_MS, windows=1, judged=1, open=0, not_closed=0,
                                 looked_at=2, resolved=3),
            flow=Flow(axis=TimeAxis(NOW_MS - HOUR_MS, 60_000, 60), events={"stored": {0: 5, 7: 5}, "delivered": {8: 4},
                      "acknowledged": {9: 3}}, trouble={State.LOST: {0: lost}}),
        )  # fmt: skip
        publish(summary, settings, stage=stage)
        return summary


def _example() -> Example:
    return Example(
        scope=Scope.MESSAGE, rule="not_in_broker", state=State.LOST, severity=Severity.FINDING, id="m", topic="t",
        of="", key="7", at_ms=NOW_MS - 5,
    )  # fmt: skip


def _report(*options: str) -> Result:
    return CliRunner().invoke(app, ["report", *options])
