"""Runs by the hour say since when evidence is still needed: from the first hour on that was never judged."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outbox_core.runtime.retention_hold import RetentionHold
from spark_reconcile.core.time_buckets import HOUR_MS
from spark_reconcile.results.evidence_retention import needed_since, write_needed
from spark_reconcile.results.summary import InputExtent


def test_evidence_is_needed_from_the_first_hour_on_that_was_never_judged() -> None:
    inputs = [_input("archive", 0), _input("business", 0), _input("outbox", 0)]

    def needed(*hours: int, slack_ms: int = 0) -> float:
        return needed_since([hour * HOUR_MS for hour in hours], inputs, slack_ms=slack_ms)["archive"] / HOUR_MS

    assert [needed(3), needed(3, 4, 5), needed(5, 3, 4, 7, 8)] == [4, 6, 6]
    assert needed(3, 4, slack_ms=HOUR_MS // 2) == 4.5
    assert needed_since([], inputs, slack_ms=0) == {}
    assert set(needed_since([0], inputs, slack_ms=0)) == {"archive"}, "nobody purges the others by age"


def test_an_hour_that_a_source_does_not_hold_any_more_needs_that_source_no_longer() -> None:
    shown = [hour * HOUR_MS for hour in (1, 2, 5, 6)]
    inputs = [
        _input("archive", 3 * HOUR_MS), _input("inbox", 4 * HOUR_MS + 1), _input("inbox", 5 * HOUR_MS),
        _input("broker", 5 * HOUR_MS), _input("broker", None),
    ]  # fmt: skip

    assert needed_since(shown, inputs, slack_ms=0) == {
        "archive": 3 * HOUR_MS, "inbox": 4 * HOUR_MS, "broker": 7 * HOUR_MS
    }  # fmt: skip


def test_what_is_written_is_what_those_who_purge_read(tmp_path: Path) -> None:
    written = write_needed(tmp_path, [0], [_input("broker", 0)], slack_ms=5, now_ms=7)

    read = msgspec.json.decode((tmp_path / "judged.json").read_bytes(), type=RetentionHold)

    assert read == written == RetentionHold(written_at_ms=7, needed_since_ms={"broker": HOUR_MS - 5})


def _input(source: str, reach_ms: int | None) -> InputExtent:
    return InputExtent(source=source, what="rows", rows=0, first_ms=0, last_ms=0, complete_since_ms=reach_ms)
