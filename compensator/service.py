"""The compensator as a service: passes on a schedule, health, an orderly stop. What a pass does is compensator.scan."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from compensator.metrics import CompensatorMetrics
from compensator.retention import Retention
from compensator.scan import PassReport, Scan
from messaging.clock import Clock, SystemClock
from messaging.errors import OutboxError

logger = logging.getLogger(__name__)

STALE_AFTER_INTERVALS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How often a pass runs. The jitter keeps many compensators from scanning in step."""

    interval_ms: int = 1_000
    retention_interval_ms: int = 60_000
    jitter_ms: int = 200
    stop_timeout_ms: int = 25_000


class CompensatorService:
    """Runs passes until stopped. start() and stop() are idempotent; a failing pass never ends the loop."""

    def __init__(
        self,
        scan: Scan,
        *,
        options: ServiceOptions,
        metrics: CompensatorMetrics,
        retention: Retention | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._scan = scan
        self._retention = retention
        self._options = options
        self._metrics = metrics
        self._stopping = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._clock = clock or SystemClock()
        self._last_success_ms = self._clock.monotonic_ms()
        self._scheduler: BackgroundScheduler | None = None

    def start(self) -> None:
        """Begin: the first pass at once, then every interval; one at a time, missed ones are not made up for."""
        if self._scheduler is not None:
            return
        self._scheduler = BackgroundScheduler(timezone="UTC")
        seconds = self._options.interval_ms / 1000
        self._scheduler.add_job(
            self._pass,
            IntervalTrigger(seconds=seconds, jitter=self._options.jitter_ms / 1000, timezone="UTC"),
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
        )
        self._scheduler.add_job(self._pass, misfire_grace_time=None)
        if self._retention is not None:
            seconds = self._options.retention_interval_ms / 1000
            trigger = IntervalTrigger(seconds=seconds, jitter=seconds / 10, timezone="UTC")
            self._scheduler.add_job(self._retain, trigger, max_instances=1, coalesce=True, misfire_grace_time=None)
        self._scheduler.start()

    def stop(self) -> bool:
        """Let the batch in hand end, claim nothing more; True when that was done within the deadline."""
        self._stopping.set()
        stopped = self._idle.wait(self._options.stop_timeout_ms / 1000)
        if self._scheduler is not None:
            self._scheduler.shutdown(wait=False)
            self._scheduler = None
        return stopped

    def healthy(self) -> bool:
        """Whether a pass has lately ended without an error of the database's; a broker's outage is not our illness."""
        allowed_ms = max(STALE_AFTER_INTERVALS * self._options.interval_ms, 10_000)
        return self._clock.monotonic_ms() - self._last_success_ms < allowed_ms

    def seconds_since_success(self) -> float:
        """How long ago a pass last ended well."""
        return (self._clock.monotonic_ms() - self._last_success_ms) / 1000

    def _pass(self) -> PassReport | None:
        if self._stopping.is_set() or not self._idle.is_set():
            return None
        self._idle.clear()
        started_ms = self._clock.monotonic_ms()
        try:
            report = self._scan.run(stopping=self._stopping)
            self._metrics.stands(self._scan.backlog())
        except OutboxError as error:
            self._metrics.failed()
            logger.warning("pass_failed", extra={"error": str(error)})
            return None
        except Exception:  # the thread boundary: the next pass must come, whatever this one met
            self._metrics.failed()
            logger.exception("pass_failed")
            return None
        finally:
            self._idle.set()
        self._last_success_ms = self._clock.monotonic_ms()
        seconds = (self._last_success_ms - started_ms) / 1000
        self._metrics.passed(report, seconds=seconds, now_seconds=self._clock.now_ms() / 1000)
        if report.claimed:
            _log_pass(report)
        return report

    def _retain(self) -> None:
        if self._retention is None or self._stopping.is_set():
            return
        try:
            archived, handled = self._retention.run(stopping=self._stopping)
        except OutboxError as error:
            logger.warning("retention_failed", extra={"error": str(error)})
        except Exception:  # the thread boundary, as in _pass
            logger.exception("retention_failed")
        else:
            if archived or handled:
                logger.info("retention_done", extra={"archive_rows": archived, "inbox_rows": handled})


def _log_pass(report: PassReport) -> None:
    logger.info(
        "pass_done",
        extra={
            "claimed": report.claimed,
            "accepted": report.accepted,
            "retried": report.retried,
            "parked": report.parked,
            "outage": str(report.outage) if report.outage else None,
        },
    )
