"""The sender: sends a commit's rows immediately, from its own thread.

No row depends on it: after a full queue, an outage of the broker or a killed process the row is still in the table, and
the compensator claims it when its lease ends. So at every shortage it drops the send, and never delays a business call.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakSet, ref

from outbox.delivery.relay import Hold, Relay, RowSettlement
from outbox.producer.timing_store_feeder import TimingStoreFeeder
from outbox.store.fork_gate import fork_gate
from outbox.store.row import OutboxRow
from outbox.telemetry import NO_TELEMETRY, Telemetry
from outbox.telemetry.failure_log import root_cause
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerError, ConfigurationError, DatabaseUnavailable, OutboxError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.delivery_decision import Acceptance
from outbox_core.messages.ids import new_token
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

logger: EventLogger = EventLogger(__name__)

IDLE_WAIT_MS: Final = 5_000
DATABASE_BACKOFF: Final = Backoff(initial_ms=50, max_ms=1_000)
"""The delay after which a settlement that failed is repeated, and a send for which the order could not be read."""
_senders: WeakSet[Sender] = WeakSet()
_watching = threading.Lock()
_hooks_set: list[bool] = []
_finalized_pids: set[int] = set()
_bounds_to_sending: Final[list[Callable[[Broker], bool]]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderLimits:
    """The sender's limits.

    `lease_ms` is how long a new row belongs to the sender before the compensator may claim it. The sender begins no
    send in the lease's last `lease_margin_ms`, which must exceed the broker adapter's time-out: so the two never race.
    A commit after a pause is sent at once; while commits keep coming they linger for `gather_ms` to form batches, which
    saves round trips.
    A message of an ordered key that must wait for an older one of another owner is retried after `held_delay_ms`.
    Accepted rows are removed from the table in batches, after `settle_delay_ms` at most: after a crash in between they
    are sent again under the same ids. A removal that failed is repeated until the lease ends.
    """

    queue_rows_max: int = 10_000
    queue_bytes_max: int = 64 * 1024 * 1024
    batch_rows_max: int = 500
    lease_ms: int = 20_000
    lease_margin_ms: int = 12_000
    close_timeout_ms: int = 5_000
    settle_delay_ms: int = 100
    settle_rows_max: int = 200
    held_delay_ms: int = 50
    gather_ms: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.lease_margin_ms < self.lease_ms:
            raise ConfigurationError(
                f"lease_margin_ms ({self.lease_margin_ms}) must be below lease_ms ({self.lease_ms}): "
                "the sender would begin no send at all"
            )
        if self.queue_rows_max < 0 or self.batch_rows_max < 1 or self.close_timeout_ms < 0:
            raise ConfigurationError("queue_rows_max, batch_rows_max and close_timeout_ms must not be negative or none")


@dataclass(frozen=True, slots=True)
class _Commit:
    """The rows of one committed transaction, and the monotonic time until which the sender may send them."""

    rows: Sequence[OutboxRow]
    deadline_ms: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """What the broker answered for a row, not written to the table yet, and until when the row's lease lasts."""

    settlement: RowSettlement
    until_ms: int


@contextmanager
def sending_only_to(allowed: Callable[[Broker], bool]) -> Iterator[None]:
    """Inside the block, senders of this process send only to brokers that `allowed` accepts.

    For tests: rows for other brokers are written as held, so that no other process sends them either.
    """
    _bounds_to_sending.append(allowed)
    try:
        yield
    finally:
        _bounds_to_sending.remove(allowed)


class Sender:
    """A bounded queue and one daemon thread, started by the first commit of each process (so forks are harmless)."""

    def __init__(
        self,
        relay: Relay,
        *,
        limits: SenderLimits,
        telemetry: Telemetry = NO_TELEMETRY,
        timers: TimingStoreFeeder | None = None,
    ) -> None:
        """`timers` gets the rows that the message table holds until they are due."""
        self._relay = relay
        self._timers = timers
        self.broker_name: str = "broker"
        """For logs, without secrets."""
        self._is_out = False
        self.limits = limits
        self._telemetry = telemetry
        telemetry.watch_queue(partial(_queued_rows, ref(self)))
        self._token = new_token()
        self._queue: deque[_Commit] = deque()
        self._queued_rows = 0
        self._queued_bytes = 0
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._closing = False
        self._stopping = threading.Event()
        self._give_up_at_ms = 0
        self._unsettled: dict[str, _Unsettled] = {}
        self._settle_at_ms = 0
        self._settle_failures = 0
        self._held: list[_Commit] = []
        self._held_until_ms = 0
        self._read_failures = 0
        _watch(self)

    @property
    def token(self) -> str:
        """Returns the token that owns the rows which this process writes, until their lease ends."""
        notice_fork()
        return self._token

    @property
    def may_send(self) -> bool:
        """Whether sends to the broker are allowed (sending_only_to)."""
        return all(allowed(self._relay.broker) for allowed in _bounds_to_sending)

    def offer(self, rows: Sequence[OutboxRow], *, written_at_ms: int) -> None:
        """Queue the rows of a commit. Never blocks and never raises; if the queue is full or the broker is not allowed
        (sending_only_to), the rows stay in the table.

        `written_at_ms` is the monotonic time just before their INSERT: the lease ends no sooner than counted from it.
        """
        notice_fork()
        if not self.may_send:
            return
        if self._timers is not None:
            timed = [row for row in rows if row.is_timed]
            self._timers.offer(timed)
            rows = [row for row in rows if not row.is_timed] if timed else rows
            if not rows:
                return
        deadline_ms = written_at_ms + self.limits.lease_ms - self.limits.lease_margin_ms
        commit = _Commit(rows, deadline_ms, sum(len(row.body) for row in rows))
        with self._wake:
            if self._closing or self._is_full(commit):
                self._drop(commit)
                return
            self._queue.append(commit)
            self._count(commit, 1)
            if self._asleep:  # otherwise it checks the queue soon anyway; waking a thread costs each commit a little
                self._asleep = False
                self._wake.notify()
            if self._thread is None:
                self._start()

    def close(self, *, timeout_ms: int | None = None) -> bool:
        """Send what is queued, for at most `timeout_ms`, and stop; returns whether the queue was emptied. Idempotent.

        Unsent rows stay in the table, and the compensator sends them.
        """
        notice_fork()
        timeout_ms = self.limits.close_timeout_ms if timeout_ms is None else timeout_ms
        with self._wake:
            self._closing = True
            self._stopping.set()
            self._give_up_at_ms = ends_ms = _monotonic_ms() + timeout_ms
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_ms / 1000)
        if self._timers is not None:
            self._timers.close(timeout_ms=max(0, ends_ms - _monotonic_ms()))
        with self._wake:
            return self._queued_rows == 0 and (thread is None or not thread.is_alive())

    def join(self) -> None:
        """Wait until what is on its way has ended; for the thread of somebody who has closed it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        _drain_with_multiprocessing()
        self._thread = threading.Thread(target=self._run, name="outbox-sender", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._thread = None
            logger.warning("sender_not_started")

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._attempt(partial(self._send, batch))
                self._stopping.wait(self.limits.gather_ms / 1000)
            if self._unsettled and self._settle_is_due():
                self._attempt(self._settle)

    def _next_batch(self) -> list[_Commit] | None:
        """Waits for commits and returns up to a batch of them; empty when a settlement is due, None to stop."""
        with self._wake:
            while not self._queue_held():
                if self._unsettled and self._settle_is_due():
                    return []
                if self._closing and not self._held and not self._may_repeat():
                    return None
                self._asleep = True
                self._wake.wait(max(0, self._next_wake_ms() - _monotonic_ms()) / 1000)
                self._asleep = False
            return self._take_batch(_monotonic_ms())

    def _queue_held(self) -> bool:
        """Queue held rows whose time has come, behind the others; returns whether anything is queued."""
        if self._held and _monotonic_ms() >= self._held_until_ms:
            self._queue.extend(self._held)
            self._held = []
        return bool(self._queue)

    def _take_batch(self, now_ms: int) -> list[_Commit]:
        batch: list[_Commit] = []
        rows = 0
        while self._queue and rows < self.limits.batch_rows_max:
            commit = self._queue.popleft()
            self._count(commit, -1)
            if now_ms >= commit.deadline_ms or (self._closing and now_ms >= self._give_up_at_ms):
                self._drop(commit)  # the compensator may own the lease by now
                continue
            batch.append(commit)
            rows += len(commit.rows)
        return batch

    def _next_wake_ms(self) -> int:
        """Returns when the thread must wake up at the latest, if nothing is committed before."""
        moments = [_monotonic_ms() + IDLE_WAIT_MS]
        if self._unsettled:
            moments.append(self._settle_at_ms)
        if self._held:
            moments.append(self._held_until_ms)
        return min(moments)

    def _is_full(self, commit: _Commit) -> bool:
        return (
            self._queued_rows + len(commit.rows) > self.limits.queue_rows_max
            or self._queued_bytes + commit.body_bytes > self.limits.queue_bytes_max
        )

    def _drop(self, commit: _Commit) -> None:
        """Drop the send: the compensator sends the rows."""
        self._telemetry.dropped(len(commit.rows))

    def _count(self, commit: _Commit, sign: int) -> None:
        self._queued_rows += sign * len(commit.rows)
        self._queued_bytes += sign * commit.body_bytes

    def _send(self, commits: Sequence[_Commit]) -> None:
        rows = [row for commit in commits for row in commit.rows]
        until_ms = min(commit.deadline_ms for commit in commits)
        try:
            settlements, outage = self._relay.send(
                rows, accepted=self._accepted(), in_time=lambda: _monotonic_ms() < until_ms
            )
        except DatabaseUnavailable:  # the order could not be read, so nothing was sent
            self._read_failures += 1
            self._hold(commits, {row.id for row in rows}, delay_ms=DATABASE_BACKOFF.delay_ms(self._read_failures))
            raise
        self._read_failures = 0
        self._log_outage(outage)
        if not self._unsettled:
            self._settle_at_ms = _monotonic_ms() + self.limits.settle_delay_ms
        held = {settlement.row_id for settlement in settlements if isinstance(settlement.decision, Hold)}
        lease_ends_ms = until_ms + self.limits.lease_margin_ms
        self._unsettled.update(
            (settlement.row_id, _Unsettled(settlement, lease_ends_ms))
            for settlement in settlements
            if settlement.row_id not in held
        )
        if held:
            self._hold(commits, held, delay_ms=self.limits.held_delay_ms)

    def _log_outage(self, outage: BrokerError | None) -> None:
        """Log the beginning and the end of an outage, a line each: what is committed meanwhile waits in the table."""
        if outage is not None and not self._is_out:
            extra = {"broker": self.broker_name, "error": str(outage), "cause": str(root_cause(outage))}
            logger.warning("broker_outage_began", extra=extra)
        elif outage is None and self._is_out:
            logger.warning("broker_outage_ended", extra={"broker": self.broker_name})
        self._is_out = outage is not None

    def _accepted(self) -> dict[str, set[str]]:
        """Returns, by order key, the ids that the broker has accepted and that are not settled in the table yet."""
        accepted_ids: defaultdict[str, set[str]] = defaultdict(set)
        for row_id, unsettled in self._unsettled.items():
            settlement = unsettled.settlement
            if settlement.key_and_number is not None and isinstance(settlement.decision, Acceptance):
                accepted_ids[settlement.key_and_number[0]].add(row_id)
        return accepted_ids

    def _hold(self, commits: Sequence[_Commit], held: set[str], *, delay_ms: int) -> None:
        """Keep rows that wait for an older message, or came too late, within their lease; after it the compensator owns
        them.
        """
        with self._wake:
            if not self._held:  # else younger ones, held batch after batch, would put off the older ones for ever
                self._held_until_ms = _monotonic_ms() + delay_ms
            for commit in commits:
                waiting = [row for row in commit.rows if row.id in held]
                if waiting:
                    held_commit = _Commit(waiting, commit.deadline_ms, sum(len(row.body) for row in waiting))
                    self._held.append(held_commit)
                    self._count(held_commit, 1)

    def _settle_is_due(self) -> bool:
        if self._settle_failures:  # the database must have time to recover, however many rows there are
            return _monotonic_ms() >= self._settle_at_ms
        is_batch = len(self._unsettled) >= self.limits.settle_rows_max
        return is_batch or self._closing or _monotonic_ms() >= self._settle_at_ms

    def _may_repeat(self) -> bool:
        """Whether a settlement that failed is still to be repeated before this thread ends."""
        return bool(self._unsettled) and _monotonic_ms() < self._give_up_at_ms

    def _settle(self) -> None:
        """Write settlements. Those that could not be written stay, to be repeated while their rows' leases last."""
        failed = list(self._unsettled)  # also where an unforeseen error ends this
        try:
            report = self._relay.settle(
                [unsettled.settlement for unsettled in self._unsettled.values()], token=self._token
            )
            failed = [settlement.row_id for settlement in report.unsettled]
            if report.error is not None and not self._settle_failures:
                raise report.error
        finally:
            self._repeat_later(failed)

    def _repeat_later(self, failed: Sequence[str]) -> None:
        now_ms = _monotonic_ms()
        still_leased = [row_id for row_id in failed if now_ms < self._unsettled[row_id].until_ms]
        to_repeat = still_leased[-self.limits.queue_rows_max :]
        if len(to_repeat) < len(failed):
            logger.warning("settlements_given_up", extra={"rows": len(failed) - len(to_repeat)})
        self._unsettled = {row_id: self._unsettled[row_id] for row_id in to_repeat}
        self._settle_failures = self._settle_failures + 1 if to_repeat else 0
        self._settle_at_ms = now_ms + DATABASE_BACKOFF.delay_ms(self._settle_failures)

    def _attempt(self, act: Callable[[], None]) -> None:
        """Run `act`; errors do not end the loop: the rows are safe in the table, and the compensator sends them."""
        try:
            act()
        except OutboxError as error:
            logger.warning("send_not_settled", extra={"error": str(error)})
        except Exception:  # the thread boundary: a defect must not end the loop
            logger.exception("send_failed")

    def reset_after_fork(self) -> None:
        """Reset in a forked child: the parent's thread, queue, token and connections remain the parent's."""
        self._relay.reset_after_fork()
        if self._timers is not None:
            self._timers.reset_after_fork()
        self._token = new_token()
        self._queue = deque()
        self._queued_rows = 0
        self._queued_bytes = 0
        self._wake = threading.Condition()
        self._thread = None
        self._asleep = False
        self._closing = False
        self._stopping = threading.Event()
        self._unsettled = {}
        self._settle_failures = 0
        self._held = []
        self._read_failures = 0


def _queued_rows(sender: ref[Sender]) -> int:
    """Returns the queue's length for metrics, without keeping the Sender alive."""
    live_sender = sender()
    return 0 if live_sender is None else live_sender._queued_rows  # noqa: SLF001 - this module's own


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _watch(sender: Sender) -> None:
    """Register this sender to be reset in forked children and drained at exit; the first one installs the hooks."""
    with _watching:
        if not _hooks_set:
            fork_gate.register()
            atexit.register(_at_exit)
            _hooks_set.append(True)
        _senders.add(sender)
    reset_in_children(sender)


def _drain_with_multiprocessing() -> None:
    """Register the drain as a finalizer: workers of multiprocessing exit without running atexit's hooks. A child
    inherits no finalizers, so the first commit of each worker registers it.
    """
    loaded: tuple[Any, Any] = sys.modules.get("multiprocessing"), sys.modules.get("multiprocessing.util")
    processes, finalizers = loaded
    if None in loaded or processes.parent_process() is None or os.getpid() in _finalized_pids:
        return
    _finalized_pids.add(os.getpid())
    finalizers.Finalize(None, _at_exit, exitpriority=10)


def _at_exit() -> None:
    for sender in list(_senders):
        sender.close()
