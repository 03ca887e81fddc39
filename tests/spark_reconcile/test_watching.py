"""The hourly loop, its metrics and the times on the command line."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import ConfigurationError
from spark_reconcile.cli.run_command import RETRY_MS, Schedule, ScheduledRuns
from spark_reconcile.core.errors import NotComparable, OutputBusy, OutputFailed
from spark_reconcile.core.time_arguments import length_ms, moment_ms
from spark_reconcile.report.prometheus import metrics_text, write_metrics
from spark_reconcile.results.summary import InputExtent, Summary, VerdictCount, WindowCounts
from spark_reconcile.rules.verdict_rule import Scope, Severity, State
from tests.outbox_broker.mounts import filled, small_disk

HOUR_MS = 3_600_000
NOON_MS = 12 * HOUR_MS


@pytest.mark.parametrize(
    ("now_ms", "due_ms"),
    [(NOON_MS, NOON_MS + 60_000), (NOON_MS + 60_000, NOON_MS + HOUR_MS + 60_000), (NOON_MS - 1, NOON_MS + 60_000)],
)
def test_a_run_is_due_when_an_hour_and_the_grace_time_are_over(now_ms: int, due_ms: int) -> None:
    assert Schedule(every_ms=HOUR_MS, after_ms=60_000).next_ms(now_ms) == due_ms


@pytest.mark.parametrize(
    "failure", [NotComparable("a segment is damaged"), OutputBusy("another run writes there"), OutputFailed("full")]
)
def test_it_runs_at_once_then_every_hour_and_sooner_after_a_failure(failure: Exception) -> None:
    clock = ManualClock(NOON_MS)
    ran: list[int] = []
    turns = threading.Semaphore(0)

    def once(now_ms: int) -> None:
        ran.append(now_ms)
        turns.release()
        if len(ran) == 2:
            raise failure

    watch = ScheduledRuns(once, schedule=Schedule(every_ms=HOUR_MS, after_ms=0), clock=clock)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        for step_ms in (HOUR_MS, RETRY_MS, HOUR_MS):
            assert turns.acquire(timeout=120)
            clock.advance(step_ms)
        assert turns.acquire(timeout=120)
    finally:
        watch.stop()
        watch.stop()
        thread.join(120)

    assert not thread.is_alive()
    assert ran == [NOON_MS, NOON_MS + HOUR_MS, NOON_MS + HOUR_MS + RETRY_MS, NOON_MS + 2 * HOUR_MS + RETRY_MS]
    assert (watch.runs, watch.failures) == (4, 1)


def test_the_metrics_of_a_run_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "textfile" / "recon.prom"

    write_metrics(path, _summary())

    written = path.read_text()
    assert written == metrics_text(_summary())
    for line in (
        "recon_last_success_timestamp_seconds 1800000000",
        "recon_window_end_timestamp_seconds 1799996400",
        'recon_source_watermark_timestamp_seconds{source="business a \\"rule\\""} 5',
        'recon_messages{state="lost"} 2',
        'recon_messages{state="early"} 0',
        'recon_findings{state="lost",severity="finding"} 2',
        "recon_unexplained_messages 0",
        "recon_earlier_findings 4",
        "recon_recheck_resolved_messages 3",
        "recon_run_duration_seconds 4.5",
    ):
        assert f"\n{line}\n" in written
    assert [one.name for one in path.parent.iterdir()] == ["recon.prom"]


def test_a_disk_that_is_full_may_have_room_later_and_a_wrong_file_never_has(tmp_path: Path) -> None:
    with small_disk(tmp_path, size_mb=1) as disk:
        write_metrics(disk / "recon.prom", _summary())
        with filled(disk, share=1.0), pytest.raises(OutputFailed, match="No space left on device"):
            write_metrics(disk / "recon.prom", _summary())
        assert (disk / "recon.prom").read_text() == metrics_text(_summary())
        write_metrics(disk / "recon.prom", _summary())

    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="name another file") as refused:
        write_metrics(tmp_path / "file" / "recon.prom", _summary())
    assert not isinstance(refused.value, OutputFailed)


def test_times_are_dates_moments_and_ages() -> None:
    assert moment_ms("1970-01-02", now_ms=0) == 24 * HOUR_MS
    assert moment_ms("1970-01-01T02:00:00+01:00", now_ms=0) == HOUR_MS
    assert moment_ms("1970-01-01T02:00:00Z", now_ms=0) == 2 * HOUR_MS
    assert moment_ms("2h", now_ms=5 * HOUR_MS) == 3 * HOUR_MS
    assert length_ms("7d") == 7 * 24 * HOUR_MS
    for wrong in ("yesterday", "2w", "", "-1h"):
        with pytest.raises(ConfigurationError, match="is no time"):
            moment_ms(wrong, now_ms=0)
    with pytest.raises(ConfigurationError, match="is no length of time"):
        length_ms("1h30m")


def _summary() -> Summary:
    lost = VerdictCount(
        scope=Scope.MESSAGE,
        topic="t",
        of="",
        state=State.LOST,
        severity=Severity.FINDING,
        rule="not_in_broker",
        count=2,
    )
    return Summary(
        run_id="r", judged_at_ms=1_800_000_000_000, business_rows=0, messages=2, message_groups=0, stored=0,
        delivered=0, redelivered=0, acknowledged=0, resent=0, deduplicated_by_broker=0, deduplicated_by_inbox=0,
        resolved=3, verdict_counts=[lost], inputs=[
            InputExtent(source="business", what='a "rule"', rows=1, first_ms=1, last_ms=5000, complete_since_ms=0)
        ],
        windows=WindowCounts(
            since_ms=0, until_ms=1_799_996_400_000, windows=1, judged=1, open=0, not_closed=0, looked_at=2, resolved=3,
            earlier_findings=4,
        ),
        took_seconds={"read": 1.5, "judge": 3.0},
    )  # fmt: skip
