"""The coordinator of a node: at each beat it confirms contact, assigns if it leads, and takes and releases shards.

All nodes run the same code. A shard moves by request: the leader assigns it to another node, its owner closes and
releases it, the other node takes it. The shard of a node that died moves once ZooKeeper has ended the node's session
(decision 105).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.cluster_view_diff import changes_between, moves
from outbox_broker.cluster.shard_decision import ClusterView, decide_assignment, decide_steps, why_waiting
from outbox_broker.cluster.shard_host import ShardHost, ShardState
from outbox_broker.cluster.shard_names import ShardMap
from outbox_broker.cluster.znode_records import REASON_CHARS_MAX, NodeRecord
from outbox_broker.cluster.zookeeper_registry import ZooKeeperRegistry
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.zookeeper.zookeeper_errors import CoordinatorUnavailable, SessionEnded

logger: EventLogger = EventLogger(__name__)

DRAINING: Final = "it is draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """Times of one node's coordinator."""

    beat_ms: int = 800
    """Between two writes that confirm contact; less than a fifth of the session time-out."""
    spacing_ms: int = 10
    """Between two beats at least, however often ZooKeeper reports a change."""
    drain_ms_max: int = 30_000
    """How long stop() waits for other nodes to take the shards over, one after the other."""
    stop_ms_max: int = 30_000
    """How long it then waits for the beat in progress, each of whose requests has a deadline."""
    open_failures_max: int = 3
    """A node none of whose shards could be opened so often declares itself unable to take any."""
    unable_ms: int = 30_000
    """For so long; then it tries again."""


class Wakeup:
    """Lets the coordinator's thread sleep until something changes. Thread-safe."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._is_set = False

    def set(self) -> None:
        """End the present sleep, or the next one."""
        with self.condition:
            self._is_set = True
            self.condition.notify_all()

    def sleep(self, clock: Clock, timeout_ms: int) -> None:
        """Sleep until set(), for `timeout_ms` at most."""
        with self.condition:
            if not self._is_set:
                clock.wait(self.condition, timeout_ms)
            self._is_set = False


class Coordinator:
    """One thread over a registry and a host. start() and stop() are idempotent; all else is thread-safe."""

    def __init__(
        self,
        *,
        registry: ZooKeeperRegistry,
        host: ShardHost[Any],
        record: NodeRecord,
        clock: Clock,
        wakeup: Wakeup,
        options: CoordinatorOptions | None = None,
        why_refusing: Callable[[], str | None] | None = None,
    ) -> None:
        """`wakeup`: set by the registry's session and by the host. `record`: how this node describes itself.
        `why_refusing`: returns why it refuses publishes, if it does.
        """
        self._registry = registry
        self._host = host
        self._record = record
        self._clock = clock
        self._wakeup = wakeup
        self._why_refusing = why_refusing or _nothing
        self._options = options or CoordinatorOptions()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._drained = threading.Event()
        self._pause = threading.Event()  # never set
        self._unable: tuple[str, int] | None = None
        self._view: ClusterView | None = None
        self._shards: ShardMap | None = None
        self._failure: str | None = None
        self._is_draining = False
        self.beats = 0

    def start(self) -> None:
        """Join the cluster, and start the thread. Raises ConfigurationError if the cluster is not one for this node,
        CoordinatorUnavailable if ZooKeeper does not answer.
        """
        if self._thread is None:
            self.beat()
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Hand the shards over to other nodes, close what is left after a deadline, and leave the cluster."""
        self._stopping.set()
        self._wakeup.set()
        if self._thread is not None:
            self._drained.wait(self._options.drain_ms_max / 1000)
            self._drained.set()  # after leave(), another beat would join the cluster again
            self._wakeup.set()
            self._thread.join(self._options.stop_ms_max / 1000)
        owned = self._host.hosted()
        self._host.stop(reason="this node is stopping")
        self._registry.leave(sorted(owned))

    def view(self) -> ClusterView:
        """Returns the cluster as of the last beat. Raises CoordinatorUnavailable without one."""
        view = self._view
        if view is None:
            raise CoordinatorUnavailable(self._failure or "this node has not joined the cluster yet")
        return view

    def shards(self) -> ShardMap:
        """Returns the shards as of the last beat. Raises CoordinatorUnavailable without one."""
        if self._shards is None:
            raise CoordinatorUnavailable(self._failure or "this node has not joined the cluster yet")
        return self._shards

    def owner_of(self, shard: str) -> tuple[bool, NodeRecord]:
        """Returns whether this node is the shard's owner, and the owner's record. Raises NotOwner, with the reason, if
        nobody serves it.
        """
        view = self.view()
        owner = view.owners.get(shard)
        if owner is not None and owner.node == view.me:
            return True, self._record
        reason = why_waiting(shard, view)
        if owner is None or reason is not None:
            raise NotOwner(f"shard {shard} waits: {reason}")
        return False, view.nodes[owner.node]

    def check(self) -> None:
        """Raise CoordinatorUnavailable if this node may not act for any shard now."""
        if (reason := self._failure or self._registry.lease.why_ended()) is not None:
            raise CoordinatorUnavailable(reason)

    def beat(self) -> None:
        """Do one beat. Raises CoordinatorUnavailable, after which the next one shows what is recorded."""
        self.beats += 1
        self._registry.describe(
            msgspec.structs.replace(self._record, unable=self._why_unable(), refuses=_short(self._why_refusing()))
        )
        view = self._registry.renew()
        shards = ShardMap(self._registry.config().generations)
        for change in changes_between(self._view, view):
            logger.log(change.level, change.event, extra={"node": view.me, **change.fields})
        self._shards, self._view = shards, view
        view = self._assigned(view, shards)
        self._take_steps(view, shards)
        self._report(view)
        self._note_drain()

    # -- one beat ----------------------------------------------------------------------------------------------------

    def _assigned(self, view: ClusterView, shards: ShardMap) -> ClusterView:
        """Returns the view with the assignment that this node decided, if it leads."""
        if not self._registry.lead(view):
            return view
        assigned = decide_assignment(view, shards=shards.names())
        if assigned == view.assigned or not self._registry.assign(assigned):
            return view
        logger.info(
            "shards_assigned",
            extra={"node": view.me, "shards": len(assigned), "nodes": len(view.nodes), "moves": moves(view, assigned)},
        )
        return replace(view, assigned=assigned)

    def _take_steps(self, view: ClusterView, shards: ShardMap) -> None:
        self._host.check()
        steps = decide_steps(view, shards=set(shards.names()), hosted=self._host.hosted())
        for shard in steps.close:
            is_lost = view.owners.get(shard) is None or view.owners[shard].node != view.me
            reason = "this node does not own it any more" if is_lost else "it is assigned to another node"
            self._host.close(shard, reason=reason, at_once=is_lost)
        self._registry.release(steps.release)
        for shard in steps.release:
            logger.info("shard_released", extra={"node": view.me, "shard": shard})
        for shard, permit in self._registry.take(sorted({*steps.take, *steps.open})).items():
            if shard in steps.take:
                logger.info("shard_taken", extra={"node": view.me, "shard": shard, "ownership": permit.epoch})
            self._host.open(shard, permit)
        self._host.forget_failures(but={shard for shard, node in view.assigned.items() if node == view.me})

    def _report(self, view: ClusterView) -> None:
        """Record what this node does with its shards, for the others and for `status`."""
        for shard, report in self._host.reports().items():
            if report.state is not ShardState.CLOSING:
                self._registry.mark(shard, state=report.state, reason=_short(report.reason))
        if self._stopping.is_set() and not self._host.hosted():
            mine = [shard for shard, owner in view.owners.items() if owner.node == view.me]
            if not mine:
                self._drained.set()

    def _note_drain(self) -> None:
        is_asked = self._registry.is_asked_to_drain()
        if is_asked != self._is_draining:
            self._is_draining = is_asked
            self._wakeup.set()  # the next beat records it

    def _why_unable(self) -> str | None:
        if self._stopping.is_set() or self._is_draining:
            return DRAINING
        now_ms = self._clock.monotonic_ms()
        if self._unable is not None and self._unable[1] > now_ms:
            return self._unable[0]
        reason = self._host.why_unable(failures=self._options.open_failures_max)
        self._unable = None if reason is None else (reason[:REASON_CHARS_MAX], now_ms + self._options.unable_ms)
        return reason

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._drained.is_set():
            wait_ms = self._options.beat_ms
            try:
                self.beat()
                self._failure = None
            except SessionEnded as error:
                self._fail(error)
                wait_ms = self._options.spacing_ms
            except OutboxError as error:
                self._fail(error)
            except Exception as error:  # the thread boundary: without beats the node would lose its shards in silence
                logger.exception("coordinator_failed")
                self._failure = str(error)
            if self._stopping.is_set() and self._failure is not None:
                self._drained.set()  # without contact nobody can take over in order
            self._pause.wait(self._options.spacing_ms / 1000)
            self._wakeup.sleep(self._clock, wait_ms)

    def _fail(self, error: OutboxError) -> None:
        """Note that there is no contact. The shards are closed once the session is over, or must be taken to be: it has
        been without contact for longer than its time-out.
        """
        if self._failure != str(error):
            logger.warning("coordinator_beat_failed", extra={"error": str(error)})
        self._failure = str(error)
        lease = self._registry.lease
        if isinstance(error, SessionEnded) or lease.overdue_ms() > lease.length_ms // 2:
            for shard in self._host.hosted():
                self._host.close(shard, reason=str(error), at_once=True)


def _nothing() -> None:
    """Publishes are not refused."""


def _short(reason: str | None) -> str | None:
    return None if reason is None else reason[:REASON_CHARS_MAX]
