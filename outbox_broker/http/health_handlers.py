"""Handlers of probes and metrics. `/livez` checks only the process; `/readyz` whether the broker can serve."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_broker.http.access_control import Role, authorize
from outbox_broker.http.problems import Problem
from outbox_broker.http.request_context import Services
from outbox_core.common.errors import OutboxError
from outbox_core.protocol.problem import ProblemKind
from outbox_core.protocol.wire import (
    Check,
    HealthAnswer,
)

LIVE = HealthAnswer(status="ok")


def readiness(services: Services, *, in_detail: bool) -> HealthAnswer:
    """Check whether the server can serve; details are for authorised senders, if tokens are used."""
    checks = [_serving(services), _storage(services, in_detail=in_detail)]
    status = "ok" if all(check.status == "ok" for check in checks) else "failed"
    if not in_detail:
        checks = [Check(name=check.name, status=check.status) for check in checks]
    return HealthAnswer(status=status, checks=checks)  # type: ignore[arg-type]  # one of the two words, as above


def may_see_detail(services: Services, headers: Mapping[str, str]) -> bool:
    """Returns whether the sender may read more than names and statuses."""
    try:
        return services.access.principal(headers).allows(Role.READ, None)
    except Problem:
        return False


def _serving(services: Services) -> Check:
    if services.stopping:
        return Check(
            name="serving", status="failed", observed="stopping", hint="wait for its restart, and look at its log"
        )
    return Check(name="serving", status="ok", observed="requests are taken")


def _storage(services: Services, *, in_detail: bool) -> Check:
    try:
        services.served.measured.check_ready()
        if not in_detail:  # log_figures() visits every run of the schedule: too much for each probe
            return Check(name="storage", status="ok")
        figures = services.served.measured.log_figures()
    except OutboxError as error:
        return Check(name="storage", status="failed", observed="it takes nothing", hint=str(error))
    observed = f"{figures['messages_bytes']:,} bytes of messages, {figures['scheduled']:,} scheduled"
    if figures.get("publishes_refused"):  # consumers must reach it all the same: they free space
        observed += "; publishes are refused until there is room on the disk"
    return Check(name="storage", status="ok", observed=observed)


def check_may_scrape(services: Services, headers: Mapping[str, str]) -> None:
    """Raise Problem if the sender may not read the metrics of every topic."""
    principal = services.access.principal(headers)
    authorize(principal, Role.READ, None)
    if not principal.covers_all:
        raise Problem(ProblemKind.FORBIDDEN, "metrics are of all topics, and the token is limited to some")
