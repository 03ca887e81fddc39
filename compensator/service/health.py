"""Health checks of a compensator, for probes, users and tests. Pure: evaluates a snapshot that it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from compensator.admission.circuit_breaker import BreakerState

_NAMES_SHOWN_MAX = 10


class CheckStatus(StrEnum):
    """The result of a check. A warning is for users; only a failure makes a probe fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One check and its result; `hint` says what to do, if there is something to do."""

    name: str
    status: CheckStatus
    observed: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """The snapshot that the checks evaluate. `failing`: sources of this instance whose last turn failed."""

    stopping: bool
    sources: int
    ours: int
    failing: Sequence[str]
    breakers: Mapping[str, BreakerState]
    seconds_since_success: float
    seconds_since_beat: float
    beat_problem: str | None
    workers_alive: int
    workers: int
    success_within_seconds: float
    beat_within_seconds: float
    timers: Mapping[str, str | None] = field(default_factory=dict)
    """Sources with a timing store, and why their timers do not fire, if so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """All checks, and their combined result."""

    checks: Sequence[HealthCheck]
    seconds_since_success: float

    @property
    def is_healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.status is not CheckStatus.FAIL for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The body of a health page."""
        return {
            "status": "ok" if self.is_healthy else "fail",
            "seconds_since_last_successful_pass": round(self.seconds_since_success, 1),
            "checks": [asdict(check) for check in self.checks],
        }


def health_of(snapshot: HealthSnapshot) -> Health:
    """Returns the checks. A broker's outage, or one dead database among many, does not make the service unhealthy."""
    checks = [
        _running(snapshot),
        _turns(snapshot),
        _sources(snapshot),
        _assignment(snapshot),
        _workers(snapshot),
        _brokers(snapshot),
        *([_timers(snapshot)] if snapshot.timers else []),
    ]
    return Health(checks=checks, seconds_since_success=snapshot.seconds_since_success)


def _running(snapshot: HealthSnapshot) -> HealthCheck:
    if snapshot.stopping:
        return HealthCheck("running", CheckStatus.FAIL, "stopping", "what is unsent stays in its table and is safe")
    return HealthCheck("running", CheckStatus.OK, "running")


def _turns(snapshot: HealthSnapshot) -> HealthCheck:
    observed = f"the last good turn ended {snapshot.seconds_since_success:.1f} s ago"
    if snapshot.seconds_since_success < snapshot.success_within_seconds:
        return HealthCheck("turns", CheckStatus.OK, observed)
    return HealthCheck("turns", CheckStatus.FAIL, observed, "see turn_failed in the log: the database, or its tables")


def _sources(snapshot: HealthSnapshot) -> HealthCheck:
    observed = f"{snapshot.ours} of {snapshot.sources} are ours"
    if not snapshot.failing:
        return HealthCheck("sources", CheckStatus.OK, observed)
    shown = ", ".join(snapshot.failing[:_NAMES_SHOWN_MAX]) + (
        ", ..." if len(snapshot.failing) > _NAMES_SHOWN_MAX else ""
    )
    return HealthCheck(
        "sources", CheckStatus.WARN, f"{observed}, {len(snapshot.failing)} fail: {shown}", "see turn_failed"
    )


def _assignment(snapshot: HealthSnapshot) -> HealthCheck:
    observed = f"the last beat was {snapshot.seconds_since_beat:.1f} s ago"
    if snapshot.beat_problem is not None:
        observed += f"; the latest one failed: {snapshot.beat_problem}"
    if snapshot.seconds_since_beat < snapshot.beat_within_seconds:
        return HealthCheck("assignment", CheckStatus.OK, observed)
    return HealthCheck(
        "assignment",
        CheckStatus.FAIL,
        observed,
        "see assignment_beat_failed in the log: the database or ZooKeeper that has the leases. Without it every source "
        "is served: what is due goes out",
    )


def _workers(snapshot: HealthSnapshot) -> HealthCheck:
    observed = f"{snapshot.workers_alive} of {snapshot.workers} run"
    if snapshot.workers_alive >= snapshot.workers:
        return HealthCheck("workers", CheckStatus.OK, observed)
    return HealthCheck(
        "workers", CheckStatus.FAIL, observed, "a worker ended by itself, which is a defect: restart, report"
    )


def _timers(snapshot: HealthSnapshot) -> HealthCheck:
    held = sorted(f"{source}: {problem}" for source, problem in snapshot.timers.items() if problem is not None)
    if not held:
        return HealthCheck("timers", CheckStatus.OK, f"those of {len(snapshot.timers)} source(s) fire")
    return HealthCheck(
        "timers", CheckStatus.WARN, "; ".join(held[:_NAMES_SHOWN_MAX]), "what is due goes out by the polls meanwhile"
    )


def _brokers(snapshot: HealthSnapshot) -> HealthCheck:
    out = sorted(broker for broker, state in snapshot.breakers.items() if state is not BreakerState.CLOSED)
    if not out:
        return HealthCheck("brokers", CheckStatus.OK, f"{len(snapshot.breakers)} in use, none out")
    states = ", ".join(f"{broker}: circuit breaker {snapshot.breakers[broker]}" for broker in out[:_NAMES_SHOWN_MAX])
    hint = "nothing is claimed for a broker that is out, and nothing is lost"
    return HealthCheck("brokers", CheckStatus.WARN, states, hint)
