"""What is not judged yet is kept for longer, and never for more than twice as long, whatever the file says."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from outbox_core import ManualClock
from outbox_core.runtime.logs import event_name
from outbox_core.runtime.retention_hold import EvidenceRetention, Purgeable, RetentionHold, retention_age_ms

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.mark.parametrize(
    ("needed_days_ago", "kept_ms"),
    [
        (0.1, 7 * DAY_MS), (7, 7 * DAY_MS + 1), (8, 8 * DAY_MS + 1), (14, 14 * DAY_MS), (15, 14 * DAY_MS),
        (900, 14 * DAY_MS), (-5, 7 * DAY_MS), (None, 7 * DAY_MS),
    ],
)  # fmt: skip
def test_what_is_needed_is_kept_up_to_twice_as_long(needed_days_ago: float | None, kept_ms: int) -> None:
    now_ms = 1000 * DAY_MS
    needed = {} if needed_days_ago is None else {"archive": now_ms - int(needed_days_ago * DAY_MS), "inbox": 0}
    judged = RetentionHold(written_at_ms=now_ms, needed_since_ms=needed)

    age_ms = retention_age_ms(judged, Purgeable.ARCHIVE, keep_ms=7 * DAY_MS, now_ms=now_ms)

    assert age_ms == kept_ms


@pytest.mark.parametrize("text", [None, "{", '{"format": 2, "written_at_ms": 1, "needed_since_ms": {}}', "[1]"])
def test_a_file_that_cannot_be_read_keeps_all_for_twice_as_long_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    path, clock = tmp_path / "judged.json", ManualClock()
    guard = EvidenceRetention(path, clock=clock)
    if text is not None:
        path.write_text(text)

    with caplog.at_level(logging.INFO, "outbox_core.runtime.retention_hold"):
        ages = {guard.age_ms(one, keep_ms=DAY_MS) for one in Purgeable}
        path.write_bytes(msgspec.json.encode(RetentionHold(written_at_ms=clock.now_ms(), needed_since_ms={})))
        mended = guard.age_ms(Purgeable.BROKER, keep_ms=DAY_MS)

    assert (ages, mended) == ({2 * DAY_MS}, DAY_MS)
    assert [event_name(one) for one in caplog.records] == ["judged_file_cannot_be_read", "judged_file_is_new_again"]


def test_a_reconciliation_that_stands_still_is_told_and_what_it_did_not_judge_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "judged.json", ManualClock()
    guard = EvidenceRetention(path, clock=clock)
    needed = {"archive": clock.now_ms() - HOUR_MS}
    path.write_bytes(msgspec.json.encode(RetentionHold(written_at_ms=clock.now_ms(), needed_since_ms=needed)))

    ages = []
    for _ in range(4):
        clock.advance(DAY_MS)
        ages.append(guard.age_ms(Purgeable.ARCHIVE, keep_ms=2 * DAY_MS))

    assert ages == [2 * DAY_MS, 2 * DAY_MS + HOUR_MS + 1, 3 * DAY_MS + HOUR_MS + 1, 4 * DAY_MS]
    assert [event_name(one) for one in caplog.records] == ["judged_file_is_old"]
