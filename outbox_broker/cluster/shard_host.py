"""Opens, runs and closes the shards of a node, each in a worker thread, and reports what became of them.

A shard whose store failed is closed and opened again, which is the only way on for it. A shard that cannot be opened is
tried again, after a pause that grows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from outbox_broker.cluster.cluster_errors import NotOwner
from outbox_broker.cluster.ownership_lease import ShardPermit
from outbox_broker.log.annotations import Annotations
from outbox_broker.segments.port import Segments
from outbox_core.common.backoff import Backoff
from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError, StorageFailed
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedShard:
    """The segments of a shard, of which this process is the only writer until `close`, the writer's epoch, and what
    owners leave beside the segments to those after them.
    """

    store: Segments
    epoch: int
    annotations: Annotations
    close: Callable[[], None]


OpenShard = Callable[[str], OpenedShard]
"""Becomes the writer of a shard, fencing all earlier ones. Raises StorageFailed, which is tried again."""


class RunningShard(Protocol):
    """A shard that serves."""

    def check(self) -> None:
        """Raise StorageFailed if it cannot make anything durable any more: it is closed and opened again then."""

    def limit_memory(self, *, hosted: int) -> None:
        """Change how much it may have in memory, on a node that hosts so many shards."""

    def close(self) -> None:
        """Complete what is in progress, refuse all else, and close its store."""


Running = TypeVar("Running", bound=RunningShard)


class ShardState(StrEnum):
    """What a node does with a shard that it owns."""

    OPENING = "opening"
    SERVING = "serving"
    FAILING = "failing to open"
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The state of one shard; `reason`: why it cannot be opened."""

    state: ShardState
    reason: str | None = None


@dataclass(slots=True, eq=False)
class _HostedShard(Generic[Running]):
    permit: ShardPermit
    state: ShardState = ShardState.OPENING
    running: Running | None = None
    is_leaving: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while the shard is opened or closed."""


@dataclass(slots=True)
class _Failure:
    reason: str
    can_pass: bool
    retry_at_ms: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """`workers_max`: shards that are opened or closed at a time; the others serve, or wait, meanwhile."""

    workers_max: int = 4
    backoff: Backoff = field(default_factory=lambda: Backoff(initial_ms=200, max_ms=10_000))


class ShardHost(Generic[Running]):
    """The shards of one node. Thread-safe. open() and close() return at once; `changed` is called when one is done."""

    def __init__(
        self,
        *,
        open_shard: OpenShard,
        run_shard: Callable[[OpenedShard, ShardPermit], Running],
        clock: Clock,
        changed: Callable[[], None],
        options: HostOptions | None = None,
    ) -> None:
        """`run_shard` starts an opened shard, which is closed if it fails to."""
        self._open_shard = open_shard
        self._run_shard = run_shard
        self._clock = clock
        self._changed = changed
        self._options = options or HostOptions()
        self._lock = threading.Lock()
        self._hosted: dict[str, _HostedShard[Running]] = {}
        self._failures: dict[str, _Failure] = {}
        self._workers = ThreadPoolExecutor(self._options.workers_max, thread_name_prefix="shard-host")

    def hosted(self) -> frozenset[str]:
        """Returns the shards that are open, or about to be opened or closed."""
        with self._lock:
            return frozenset(self._hosted)

    def reports(self) -> Mapping[str, ShardReport]:
        """Returns the state of each hosted shard, and of those that could not be opened."""
        with self._lock:
            failing = {shard: ShardReport(ShardState.FAILING, one.reason) for shard, one in self._failures.items()}
            return failing | {shard: ShardReport(one.state) for shard, one in self._hosted.items()}

    def serving(self) -> dict[str, Running]:
        """Returns the shards that serve."""
        with self._lock:
            return {shard: one.running for shard, one in self._hosted.items() if one.running is not None}

    def get(self, shard: str) -> Running:
        """Returns a shard that serves. Raises NotOwner for one that does not, or not any more."""
        with self._lock:
            one = self._hosted.get(shard)
            running = None if one is None else one.running
        if one is None or running is None:
            raise NotOwner(f"shard {shard} is not served by this node now; repeat the request")
        one.permit.require()
        return running

    def open(self, shard: str, permit: ShardPermit) -> None:
        """Open a shard, if it is not hosted and its next attempt is due."""
        with self._lock:
            failure = self._failures.get(shard)
            if shard in self._hosted or (failure is not None and failure.retry_at_ms > self._clock.monotonic_ms()):
                return
            one = self._hosted[shard] = _HostedShard(permit)
        self._workers.submit(self._open, shard, one)

    def close(self, shard: str, *, reason: str, at_once: bool = False) -> None:
        """Close a shard in a worker thread. It serves until then, unless it must stop `at_once`. Idempotent."""
        with self._lock:
            one = self._hosted.get(shard)
            if one is None:
                return
            if at_once:
                one.permit.revoke(reason)
            if one.is_leaving:
                return
            one.is_leaving = True
        logger.info("shard_closing", extra={"shard": shard, "reason": reason})
        self._workers.submit(self._close, shard, one, reason)

    def check(self) -> None:
        """Begin to close the shards that cannot make anything durable any more; the next open() opens them anew."""
        for shard, running in self.serving().items():
            try:
                running.check()
            except StorageFailed as error:
                logger.warning("shard_store_failed", extra={"shard": shard, "error": str(error)})
                self.close(shard, reason=f"its store failed: {error}")

    def why_unable(self, *, failures: int) -> str | None:
        """Returns why this node can open no shard at all now: each that it tried failed so often for a cause that may
        be the node's own. None if it can, or has not tried.
        """
        with self._lock:
            serves = any(one.state is ShardState.SERVING for one in self._hosted.values())
            causes = [one for one in self._failures.values() if one.can_pass]
            if serves or not causes or min(one.count for one in causes) < failures:
                return None
            return causes[0].reason

    def forget_failures(self, *, but: AbstractSet[str]) -> None:
        """Forget the failures of shards that are not this node's any more."""
        with self._lock:
            for shard in self._failures.keys() - but:
                del self._failures[shard]

    def stop(self, *, reason: str) -> None:
        """Close all shards, and return once that is done."""
        for shard in self.hosted():
            self.close(shard, reason=reason)
        self._workers.shutdown(wait=True)

    # -- in worker threads -------------------------------------------------------------------------------------------

    def _open(self, shard: str, one: _HostedShard[Running]) -> None:
        with one.turn:
            if one.permit.why_ended() is not None:  # closed before its turn came
                self._remove(shard, one)
            else:
                self._open_now(shard, one)
        self._changed()

    def _open_now(self, shard: str, one: _HostedShard[Running]) -> None:
        try:
            opened = self._open_shard(shard)
            running = self._started(opened, one.permit)
        except OutboxError as error:
            self._fail(shard, one, error)
        except Exception as error:  # the thread boundary: the shard would stay "opening" for ever
            logger.exception("shard_open_failed", extra={"shard": shard})
            self._fail(shard, one, error)
        else:
            with self._lock:
                self._failures.pop(shard, None)
                one.running, one.state = running, ShardState.SERVING
            logger.info("shard_opened", extra={"shard": shard, "epoch": opened.epoch, "ownership": one.permit.epoch})
            self._divide_memory()

    def _started(self, opened: OpenedShard, permit: ShardPermit) -> Running:
        try:
            return self._run_shard(opened, permit)
        except BaseException:
            opened.close()  # the next owner, here or elsewhere, must not find it in use
            raise

    def _close(self, shard: str, one: _HostedShard[Running], reason: str) -> None:
        with one.turn:  # an opening in progress ends first
            with self._lock:
                running, one.running = one.running, None
                one.state = ShardState.CLOSING
            one.permit.revoke(reason)  # no send begins from now on, even if closing fails
            try:
                if running is not None:
                    running.close()
            except OutboxError as error:  # fenced, or without its store: its successor recovers it
                logger.warning("shard_close_failed", extra={"shard": shard, "error": str(error)})
            except Exception:  # the thread boundary, as above
                logger.exception("shard_close_failed", extra={"shard": shard})
            self._remove(shard, one)
        logger.info("shard_closed", extra={"shard": shard, "reason": reason})
        self._divide_memory()
        self._changed()

    def _remove(self, shard: str, one: _HostedShard[Running]) -> None:
        with self._lock:
            if self._hosted.get(shard) is one:
                del self._hosted[shard]

    def _fail(self, shard: str, one: _HostedShard[Running], error: Exception) -> None:
        with self._lock:
            earlier = self._failures.get(shard)
            count = 1 if earlier is None else earlier.count + 1
            self._failures[shard] = _Failure(
                reason=str(error) or type(error).__name__,
                can_pass=isinstance(error, OutboxError) and error.retryable,
                retry_at_ms=self._clock.monotonic_ms() + self._options.backoff.delay_ms(count),
                count=count,
            )
        self._remove(shard, one)
        logger.warning("shard_open_failed", extra={"shard": shard, "failures": count, "error": str(error)})

    def _divide_memory(self) -> None:
        serving = self.serving()
        for running in serving.values():
            running.limit_memory(hosted=len(serving))
