"""How a compensator is, as checks that a probe, a person and a test read alike. Pure: it is given what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from compensator.admission.circuit_breaker import BreakerState

_NAMES_SHOWN_MAX = 10


class CheckStatus(StrEnum):
    """What a check comes to. A warning is for people; only a failure makes a probe fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing looked at; `hint` says what to do about it, where there is something to do."""

    name: str
    status: CheckStatus
    observed: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the checks go by. `failing`: our sources whose last turn failed."""

    stopping: bool
    sources: int
    ours: int
    failing: Sequence[str]
    breakers: Mapping[str, BreakerState]
    seconds_since_success: float
    seconds_since_beat: float
    workers_alive: int
    workers: int
    success_within_seconds: float
    beat_within_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """All checks, and what they come to together."""

    checks: Sequence[HealthCheck]
    seconds_since_success: float

    @property
    def well(self) -> bool:
        """No check failed."""
        return all(check.status is not CheckStatus.FAIL for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The body of a health page."""
        return {
            "status": "ok" if self.well else "fail",
            "seconds_since_last_successful_pass": round(self.seconds_since_success, 1),
            "checks": [asdict(check) for check in self.checks],
        }


def judge(seen: Seen) -> Health:
    """The checks of a compensator. A broker's outage, or one dead database among many, is not its own illness."""
    checks = [_running(seen), _turns(seen), _sources(seen), _assignment(seen), _workers(seen), _brokers(seen)]
    return Health(checks=checks, seconds_since_success=seen.seconds_since_success)


def _running(seen: Seen) -> HealthCheck:
    if seen.stopping:
        return HealthCheck("running", CheckStatus.FAIL, "stopping", "what is unsent stays in its table and is safe")
    return HealthCheck("running", CheckStatus.OK, "running")


def _turns(seen: Seen) -> HealthCheck:
    observed = f"the last good turn ended {seen.seconds_since_success:.1f} s ago"
    if seen.seconds_since_success < seen.success_within_seconds:
        return HealthCheck("turns", CheckStatus.OK, observed)
    return HealthCheck("turns", CheckStatus.FAIL, observed, "see turn_failed in the log: the database, or its tables")


def _sources(seen: Seen) -> HealthCheck:
    observed = f"{seen.ours} of {seen.sources} are ours"
    if not seen.failing:
        return HealthCheck("sources", CheckStatus.OK, observed)
    shown = ", ".join(seen.failing[:_NAMES_SHOWN_MAX]) + (", ..." if len(seen.failing) > _NAMES_SHOWN_MAX else "")
    return HealthCheck("sources", CheckStatus.WARN, f"{observed}, {len(seen.failing)} fail: {shown}", "see turn_failed")


def _assignment(seen: Seen) -> HealthCheck:
    observed = f"the last beat was {seen.seconds_since_beat:.1f} s ago"
    if seen.seconds_since_beat < seen.beat_within_seconds:
        return HealthCheck("assignment", CheckStatus.OK, observed)
    return HealthCheck("assignment", CheckStatus.FAIL, observed, "see chore_failed in the log: the lease database")


def _workers(seen: Seen) -> HealthCheck:
    observed = f"{seen.workers_alive} of {seen.workers} run"
    if seen.workers_alive >= seen.workers:
        return HealthCheck("workers", CheckStatus.OK, observed)
    return HealthCheck(
        "workers", CheckStatus.FAIL, observed, "a worker ended by itself, which is a defect: restart, report"
    )


def _brokers(seen: Seen) -> HealthCheck:
    out = sorted(broker for broker, state in seen.breakers.items() if state is not BreakerState.CLOSED)
    if not out:
        return HealthCheck("brokers", CheckStatus.OK, f"{len(seen.breakers)} in use, none out")
    states = ", ".join(f"{broker} is {seen.breakers[broker]}" for broker in out[:_NAMES_SHOWN_MAX])
    return HealthCheck("brokers", CheckStatus.WARN, states, "nothing is claimed for it meanwhile, and nothing is lost")
