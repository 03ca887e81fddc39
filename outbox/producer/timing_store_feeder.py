"""TimingStoreFeeder: adds the timers of committed rows to a timing store, from its own thread.

No row depends on it: the compensator finds each one in its table when it is due. So at every shortage it drops timers,
and never delays a business call or a send.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outbox.store.message_table import MessageStore
from outbox.store.row import OutboxRow
from outbox.telemetry import NO_TELEMETRY, Telemetry
from outbox_core.common.errors import OutboxError
from outbox_core.messages.timing_port import TimedRow, Timer, TimerSink
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerLimits:
    """The limits of a TimingStoreFeeder. After a failure nothing is added for `pause_ms`: an outage costs little."""

    queue_timers_max: int = 50_000
    batch_timers_max: int = 1_000
    pause_ms: int = 5_000


class TimingStoreFeeder:
    """A bounded queue and one daemon thread, started by the first timer of each process. Thread-safe."""

    def __init__(
        self,
        sink: TimerSink,
        *,
        store: MessageStore,
        limits: TimerLimits | None = None,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        """`store`: of the table of rows which name none."""
        self._sink = sink
        self._store = store
        self._limits = limits or TimerLimits()
        self._telemetry = telemetry
        self._begin()

    def offer(self, rows: Sequence[OutboxRow]) -> None:
        """Queue the timers of rows that were committed. Never blocks and never raises."""
        timers = [self._timer(row) for row in rows]
        if not timers:
            return
        with self._changed:
            room = 0 if self._closing else max(0, self._limits.queue_timers_max - len(self._queue))
            self._queue.extend(timers[:room])
            self._changed.notify()
            dropped = len(timers) - min(room, len(timers))
            if room and self._thread is None:
                self._start()
        if dropped:
            self._telemetry.dropped(dropped)

    def close(self, *, timeout_ms: int) -> None:
        """Add what is queued, for at most `timeout_ms`, and stop. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        self._stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_ms / 1000)
        self._sink.close()

    def reset_after_fork(self) -> None:
        """Reset in a forked child: the parent's thread and queue remain the parent's."""
        self._begin()

    def _begin(self) -> None:
        self._queue: deque[Timer] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="outbox-timers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._thread = None
            logger.warning("timer_adder_not_started")

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._sink.add(batch)
            except OutboxError as error:
                self._fail(batch, str(error))
            except Exception as error:  # the thread boundary: an adapter's defect must not end the loop
                logger.exception("timers_failed")
                self._fail(batch, str(error))

    def _next_batch(self) -> list[Timer]:
        """Waits for timers and returns up to a batch of them; empty: it was closed, and all are added."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), self._limits.batch_timers_max))]

    def _fail(self, batch: Sequence[Timer], error: str) -> None:
        logger.warning("timers_not_added", extra={"timers": len(batch), "error": error})
        self._telemetry.dropped(len(batch))
        if self._stopping.wait(self._limits.pause_ms / 1000):  # closing: do not try a dead store batch by batch
            with self._changed:
                self._queue.clear()

    def _timer(self, row: OutboxRow) -> Timer:
        return Timer(TimedRow((row.table or self._store.table).name, row.id), row.deliver_at_ms or 0)
