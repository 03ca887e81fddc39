"""The demo's port to what keeps scheduled messages until they are due: started, broken once, asked what waits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from outbox_demo.plan import DemoPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerRoute:
    """Where producers and the compensator publish to."""

    broker_url: str
    timing_url: str | None = None
    """The timing store, where scheduled messages wait in the message table."""


class DelayEngine(Protocol):
    """Keeps the scheduled messages of one run. Raises BrokerError while it is out."""

    def start(self, target_url: str) -> ProducerRoute:
        """Start it in front of a broker. Raises ConfigurationError that names the cure where it cannot run."""

    def start_workers(self, plan: DemoPlan) -> None:
        """Start what needs the database."""

    def kill(self) -> str:
        """Kill what may be killed in the middle of the run; returns what that is, in words."""

    def restart(self) -> str:
        """Start again what was killed; returns what that is, in words."""

    def scheduled(self) -> int:
        """Returns how many messages of the run wait, or more while some that were canceled are still counted."""

    def waiting(self, ids: Collection[str]) -> frozenset[str]:
        """Returns those of these messages that wait."""

    def close(self) -> None:
        """Remove what the run has left in servers that are not the run's own, and close the connections. Its processes
        have ended.
        """


def with_option(url: str, name: str, value: str) -> str:
    """Returns a URL with one more option."""
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"
