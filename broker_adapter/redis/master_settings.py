"""Keeps the masters' last reports of their settings, on which publishes depend."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from broker_adapter.redis.connections import Servers
from broker_adapter.redis.durability_inspection import BULK_BYTES_MAX_DEFAULT, MasterReport, inspect_master
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.script_sender import Deadline, ScriptSender
from outbox_core.common.clock import Clock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.durability_inspection import Weakness
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


class MasterSettings:
    """Thread-safe. Raises BrokerError where the masters cannot be asked."""

    def __init__(self, sender: ScriptSender, options: RedisOptions, *, clock: Clock) -> None:
        self._sender = sender
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas = options.replicas
        self._eviction: Weakness | None = None
        self.bulk_bytes_max = BULK_BYTES_MAX_DEFAULT

    def ask(self, deadline: Deadline) -> list[MasterReport]:
        """Inspect each master, and remember what publishes have to know."""
        reports = self._sender.until_answered(self._master_reports, deadline)
        self._learn(reports)
        return reports

    def replicas_to_wait_for(self, deadline: Deadline) -> int:
        """Returns how many replicas must have a message before it is acknowledged; asks the masters the first time."""
        if self._replicas is None:
            self.ask(deadline)
        return self._replicas or 0

    def refuse_eviction(self, deadline: Deadline) -> None:
        """Raise StorageFailed while a master may remove whole keys; asks again whether that was cured."""
        if self._eviction is not None:
            self.ask(deadline)
        if self._eviction is not None:
            raise StorageFailed(f"refused, since what is accepted would be lost: {self._eviction}")

    def _master_reports(self, servers: Servers) -> list[MasterReport]:
        options = self._options
        return [
            inspect_master(
                address, node, replicas_wanted=options.replicas, has_timers=options.has_timers, clock=self._clock
            )
            for address, node in servers.masters()
        ]

    def _learn(self, reports: Sequence[MasterReport]) -> None:
        """Remember what publishes must know. The number to wait for never falls: a replica that is lost is an outage
        of durability, which must not pass for a server that never had one.
        """
        with self._lock:
            self.bulk_bytes_max = min(report.bulk_bytes_max for report in reports)
            self._eviction = next((report.eviction for report in reports if report.eviction is not None), None)
            if self._options.replicas is not None:
                return
            known_replicas, connected = self._replicas, int(any(report.replicas for report in reports))
            self._replicas = max(connected, known_replicas or 0)
        if self._replicas != known_replicas:
            extra = {"replicas": self._replicas, "addresses": self._sender.addresses}
            logger.info("redis_waits_for_replicas", extra=extra)
