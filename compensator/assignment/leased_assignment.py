"""Assignment by leases in a database: what one instance does at each beat. No thread and no schedule of its own."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine

from compensator.assignment.lease_store import InstanceRow, LeaseStore
from outbox.store.database import database_errors
from outbox_core.assignment.lease_decision import Decision, View, decide
from outbox_core.assignment.resource import Resource, check_zone
from outbox_core.common.errors import ConfigurationError, DatabaseUnavailable, OutboxError
from outbox_core.messages.ids import new_token

logger = logging.getLogger(__name__)

SOURCES_MAX: Final = 10_000
OVERDUE_BEATS: Final = 3
_NAMES_LOGGED_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """The interval of beat(), and how long after its last beat an instance counts as dead."""

    beat_ms: int = 2_000
    lease_ms: int = 6_000
    forget_after_ms: int = 600_000

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_ms <= self.lease_ms:
            raise ConfigurationError("lease_ms must be at least two beats, so that one late beat costs nothing")
        if self.forget_after_ms < self.lease_ms:
            raise ConfigurationError("forget_after_ms must not be below lease_ms")


class LeasedAssignment:
    """One instance among many. Every process, including a forked one, is an instance of its own, under a new id.

    While the database is unavailable, the instance keeps its sources (overlap is harmless, a source that no instance
    serves is not), and the next beat tries again.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        store: LeaseStore,
        zone: str | None = None,
        options: LeaseOptions | None = None,
        new_id: Callable[[], str] = new_token,
    ) -> None:
        """`engine`: READ COMMITTED, a pool of its own, short time-outs; see assignment_factory.lease_engine()."""
        check_zone(zone)
        self._engine = engine
        self._store = store
        self._zone = zone
        self._options = options or LeaseOptions()
        self._new_id = new_id
        self._lock = threading.Lock()
        self._instance = new_id()
        self._held: frozenset[str] = frozenset()
        self._waited: Counter[str] = Counter()
        self._joined = False
        self._left = False
        self._failed_beats = 0
        _watch_forks(self)

    @property
    def instance(self) -> str:
        """The id of this process's instance."""
        return self._instance

    @property
    def options(self) -> LeaseOptions:
        """The interval of beat(), and the limits that follow from it."""
        return self._options

    @property
    def failed_beats(self) -> int:
        """See Assignment.failed_beats."""
        return self._failed_beats

    def beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        """See Assignment.beat. Three statements if nothing changes, whatever the number of sources."""
        if len(sources) > SOURCES_MAX:
            raise ConfigurationError(f"{len(sources):,} sources are more than {SOURCES_MAX:,}: use more lease schemas")
        with self._lock:
            if self._left:
                return frozenset()
            try:
                held = self._beat(sources)
            except OutboxError as error:
                self._fail(error)
            else:
                self._succeed(held)
            return self._held & {source.name for source in sources}

    def leave(self) -> None:
        """See Assignment.leave. If the database is unavailable, the leases expire."""
        with self._lock:
            if self._left:
                return
            self._left = True
            held, self._held = sorted(self._held), frozenset()
            if self._joined:
                self._say_good_bye(held)
            self._engine.dispose()

    def reset_after_fork(self) -> None:
        """Become a new instance in a forked child; connections, leases and lock remain the parent's."""
        self._engine.dispose(close=False)
        self._lock = threading.Lock()
        self._instance = self._new_id()
        self._held = frozenset()
        self._waited = Counter()
        self._joined = self._left = False
        self._failed_beats = 0

    # -- one beat; each step is a short transaction of its own -------------------------------------------------------

    def _beat(self, sources: Sequence[Resource]) -> frozenset[str]:
        with database_errors(self._engine.url), self._engine.connect() as connection:
            self._live_on(connection)
            with connection.begin():
                rows = self._store.instances(connection)
                leases = self._store.leases(connection)
            view = View(me=self._instance, instances=self._alive(rows), leases=leases)
            decision = decide(view, sources, overdue=self._overdue())
            self._waited = Counter({name: self._waited[name] + 1 for name in decision.waiting})
            taken = self._act(connection, decision)
            self._purge(connection, rows)
        kept = {name for name, lease in leases.items() if lease.holder == self._instance}
        return frozenset((kept - set(decision.release)) | taken)

    def _live_on(self, connection: Connection) -> None:
        lease_us = self._options.lease_ms * 1000
        with connection.begin():
            if self._store.renew(connection, self._instance, lease_us=lease_us):
                return
            self._store.join(connection, self._instance, zone=self._zone, lease_us=lease_us)
        self._joined = True
        logger.info("assignment_joined", extra={"instance": self._instance, "zone": self._zone})

    def _alive(self, rows: Sequence[InstanceRow]) -> dict[str, str | None]:
        # This instance is alive, even if the database's clock was stepped since its row was written.
        return {row.id: row.zone for row in rows if row.dead_for_us < 0} | {self._instance: self._zone}

    def _overdue(self) -> set[str]:
        return {name for name, beats in self._waited.items() if beats >= OVERDUE_BEATS}

    def _act(self, connection: Connection, decision: Decision) -> set[str]:
        """Execute the decision; returns the sources taken. One transaction a step: no step holds locks of another."""
        me = self._instance
        for change, names in (
            (self._store.release, decision.release),
            (self._store.offer, decision.offer),
            (self._store.keep, decision.keep),
        ):
            if names:
                with connection.begin():
                    change(connection, names, instance=me)
        if decision.add:
            with connection.begin():
                self._store.add(connection, decision.add)
        return self._take(connection, decision.take)

    def _take(self, connection: Connection, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        with connection.begin():
            taken = self._store.take(connection, names, instance=self._instance)
        if taken == len(names):
            return set(names)
        with connection.begin():  # other instances may have taken some first
            return self._store.held(connection, names, instance=self._instance)

    def _purge(self, connection: Connection, rows: Sequence[InstanceRow]) -> None:
        older_than_us = self._options.forget_after_ms * 1000
        dead = [row.id for row in rows if row.dead_for_us > older_than_us]
        if dead:
            with connection.begin():
                self._store.purge(connection, dead, older_than_us=older_than_us)

    def _say_good_bye(self, held: Sequence[str]) -> None:
        try:
            with database_errors(self._engine.url), self._engine.connect() as connection:
                if held:
                    with connection.begin():
                        self._store.release(connection, held, instance=self._instance)
                with connection.begin():
                    self._store.withdraw(connection, self._instance)
        except OutboxError as error:
            logger.warning("assignment_leave_failed", extra={"instance": self._instance, "error": str(error)})
        else:
            logger.info("assignment_left", extra={"instance": self._instance, "sources": len(held)})

    # -- result of a beat --------------------------------------------------------------------------------------------

    def _fail(self, error: OutboxError) -> None:
        """Keep the sources that are held. At the first beat none is, and a wrong configuration must be reported."""
        if not self._joined and not isinstance(error, DatabaseUnavailable):
            raise error
        self._failed_beats += 1
        extra = {"instance": self._instance, "beats": self._failed_beats, "error": str(error)}
        logger.warning("assignment_beat_failed", extra=extra)

    def _succeed(self, held: frozenset[str]) -> None:
        gained, lost = sorted(held - self._held), sorted(self._held - held)
        self._held = held
        self._failed_beats = 0
        if gained or lost:
            logger.info(
                "sources_assigned",
                extra={
                    "instance": self._instance,
                    "sources": len(held),
                    "gained": len(gained),
                    "lost": len(lost),
                    "gained_names": gained[:_NAMES_LOGGED_MAX],
                    "lost_names": lost[:_NAMES_LOGGED_MAX],
                },
            )


_assignments: weakref.WeakSet[LeasedAssignment] = weakref.WeakSet()
_fork_hook_is_set = threading.Event()


def _watch_forks(assignment: LeasedAssignment) -> None:
    """Reset this assignment in forked children; the first one registers the process's only hook."""
    if not _fork_hook_is_set.is_set():
        _fork_hook_is_set.set()
        os.register_at_fork(after_in_child=_after_fork_in_child)
    _assignments.add(assignment)


def _after_fork_in_child() -> None:
    for assignment in list(_assignments):
        assignment.reset_after_fork()
