"""Assigns sources to this instance: the port, and its two implementations, all sources and those whose leases it holds.

What one instance does at each beat; no thread and no schedule of its own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from compensator.assignment.instance_registry_port import InstanceRegistry, LeaseOptions
from outbox_core.assignment.even_assignment import Resource
from outbox_core.assignment.lease_decision import decide
from outbox_core.assignment.registry import execute
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable

logger: EventLogger = EventLogger(__name__)


class Assignment(Protocol):
    """Decides which sources this instance serves. Called periodically from one thread.

    Two instances may be assigned the same source for a few beats: rows are claimed by compare-and-set, so overlap costs
    a statement, not a duplicate. Each source is assigned to at least one live instance that knows it, except for the
    time until the death of an instance is noticed.
    """

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """Record that this instance is alive and knows these sources; returns the names of those assigned to it.

        Idempotent. Does not raise if the registry is unavailable: the assignment stays as it was. Raises UsageError
        (missing tables, a refused user) when the first beat cannot work.
        """

    def leave(self) -> None:
        """Release all sources, at stop: others take them at their next beat. Idempotent, final, never raises."""

    @property
    def instance(self) -> str:
        """The id of this process in the registry; empty without one, and before it is known."""

    @property
    def failed_beats(self) -> int:
        """How many of the latest beats failed in a row; 0 if the last one succeeded."""

    @property
    def problem(self) -> str | None:
        """Why the last beat failed; None if it succeeded."""


class UnleasedAssignment:
    """Assigns every source to this instance, without leases. Several such compensators poll the same sources."""

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """All of `sources`."""
        return frozenset(source.name for source in sources)

    def leave(self) -> None:
        """Does nothing: no leases are held."""

    @property
    def instance(self) -> str:
        """Always empty: there is no registry."""
        return ""

    @property
    def failed_beats(self) -> int:
        """Always 0: no database is used."""
        return 0

    @property
    def problem(self) -> str | None:
        """Always None."""
        return None


SOURCES_MAX: Final = 10_000
OVERDUE_BEATS: Final = 3
_NAMES_LOGGED_MAX: Final = 20


class LeasedAssignment:
    """One instance among many. Every process, including a forked one, is an instance of its own, under a new id.

    While the registry is unavailable, the instance keeps its sources, and the next beat tries again. After
    `alone_after_beats` it serves every source: what a dead instance held must not wait for the registry.
    """

    def __init__(self, registry: InstanceRegistry) -> None:
        """`registry`: this instance's own, which leave() closes."""
        self._registry = registry
        self._lock = threading.Lock()
        self._held: frozenset[str] = frozenset()
        self._waited: Counter[str] = Counter()
        self._left = False
        self._failed_beats = 0
        self._problem: str | None = None
        reset_in_children(self)

    @property
    def instance(self) -> str:
        """The id of this process's instance."""
        notice_fork()
        return self._registry.instance

    @property
    def options(self) -> LeaseOptions:
        """The interval of beat(), and the limits that follow from it."""
        return self._registry.options

    @property
    def failed_beats(self) -> int:
        """See Assignment.failed_beats."""
        notice_fork()
        return self._failed_beats

    @property
    def problem(self) -> str | None:
        """See Assignment.problem."""
        notice_fork()
        return self._problem

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """See Assignment.beat. If nothing changes, a database gets three statements, ZooKeeper nothing."""
        if len(sources) > SOURCES_MAX:
            raise ConfigurationError(f"{len(sources):,} sources are more than {SOURCES_MAX:,}: use more lease schemas")
        notice_fork()
        with self._lock:
            if self._left:
                return frozenset()
            try:
                held = self._beat(sources)
            except OutboxError as error:
                self._fail(error, sources)
            else:
                self._succeed(held)
            return self._held & {source.name for source in sources}

    def leave(self) -> None:
        """See Assignment.leave. If the registry is unavailable, the leases expire."""
        notice_fork()
        with self._lock:
            if self._left:
                return
            self._left = True
            held, self._held = sorted(self._held), frozenset()
            self._withdraw(held)
            self._registry.close()

    def reset_after_fork(self) -> None:
        """Become a new instance in a forked child; connections, leases and lock remain the parent's."""
        self._registry.reset_after_fork()
        self._lock = threading.Lock()
        self._held = frozenset()
        self._waited = Counter()
        self._left = False
        self._failed_beats = 0
        self._problem = None

    def _beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        view = self._registry.renew()
        decision = decide(view, sources, overdue=self._overdue())
        self._waited = Counter({name: self._waited[name] + 1 for name in decision.waiting})
        taken = execute(decision, self._registry)
        self._registry.purge()
        kept = {name for name, lease in view.leases.items() if lease.holder == view.me}
        return frozenset((kept - set(decision.release)) | taken)

    def _overdue(self) -> set[str]:
        return {name for name, beats in self._waited.items() if beats >= OVERDUE_BEATS}

    def _withdraw(self, held: Sequence[str]) -> None:
        if not self._registry.joined:
            return
        try:
            self._registry.leave(held)
        except OutboxError as error:
            logger.warning("assignment_leave_failed", extra={"instance": self.instance, "error": str(error)})
        else:
            logger.info("assignment_left", extra={"instance": self.instance, "sources": len(held)})

    # -- result of a beat --------------------------------------------------------------------------------------------

    def _fail(self, error: OutboxError, sources: Sequence[Resource]) -> None:
        """Keep the sources that are held. At the first beat none is, and a wrong configuration must be reported."""
        if not self._registry.joined and not isinstance(error, DatabaseUnavailable | CoordinatorUnavailable):
            raise error
        self._failed_beats += 1
        self._problem = str(error)
        extra = {"instance": self.instance, "beats": self._failed_beats, "error": str(error)}
        logger.warning("assignment_beat_failed", extra=extra)
        if self._failed_beats >= self.options.alone_after_beats:
            self._hold(frozenset(source.name for source in sources))

    def _succeed(self, held: frozenset[str]) -> None:
        self._failed_beats = 0
        self._problem = None
        self._hold(held)

    def _hold(self, held: frozenset[str]) -> None:
        gained, lost = sorted(held - self._held), sorted(self._held - held)
        self._held = held
        if gained or lost:
            logger.info(
                "sources_assigned",
                extra={
                    "instance": self.instance,
                    "sources": len(held),
                    "alone": self._failed_beats > 0,
                    "gained": len(gained),
                    "lost": len(lost),
                    "gained_names": gained[:_NAMES_LOGGED_MAX],
                    "lost_names": lost[:_NAMES_LOGGED_MAX],
                },
            )
