"""Processes batches in a pipeline: while one is sent, the next one is claimed and the one before is settled.

The steps wait for different things (the database, the broker, the database again), so concurrently they take as long
as the slowest of them, not as long as their sum. At most three batches are in progress. The first batch is processed
alone: if the broker is out, nothing else is claimed, and a single batch, the usual case, needs no thread.

PermittedBatches claims, sends and releases batches of one source, each under a permit of its broker's gate: what the
steps of a turn are made of (source_turn.py, timer_turn.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

from compensator.admission.circuit_breaker import Permit
from compensator.work.claim_and_relay import ClaimedBatch
from compensator.work.poison_row_isolation import SentBatch
from compensator.work.source import Source
from outbox_core.common.errors import BrokerError

_NONE: Mapping[str, Collection[str]] = {}


class PipelineSteps(Protocol):
    """Claims, sends and settles. Each step is called by one thread at a time, different steps concurrently."""

    def claim(self) -> ClaimedBatch | None:
        """Claim the next batch; None: there is none, or none may be claimed now."""

    def send(self, claimed: ClaimedBatch, *, accepted: Mapping[str, Collection[str]]) -> SentBatch:
        """Send a batch; `accepted`: what the broker accepted of the batch before, whose rows may not be settled yet."""

    def settle(self, sent: SentBatch) -> None:
        """Write the results of a batch."""

    def release(self, claimed: ClaimedBatch, *, error: BrokerError | None) -> None:
        """Release a batch unsent."""

    def more(self) -> bool:
        """Whether another claim is likely to find rows."""

    def stopped(self) -> bool:
        """Whether claimed batches must not be sent any more."""


def run_pipeline(work: PipelineSteps) -> None:
    """Process batches until there are none, the broker is out, or the work is stopped. Raises the errors of the steps,
    after every batch in progress is settled, released or, if that failed too, left until its lease ends.
    """
    first = work.claim()
    if first is None:
        return
    sent = work.send(first, accepted=_NONE)
    work.settle(sent)
    if sent.outage is not None or work.stopped() or not work.more():
        return
    with ThreadPoolExecutor(2, thread_name_prefix="compensator-stage") as pool, ExitStack() as ending:
        stages = _Stages(work, pool)
        ending.callback(stages.end_settling)
        ending.callback(stages.end_claiming)
        stages.run()


class _Stages:
    """At most three batches: one is claimed, one is sent, one is settled."""

    def __init__(self, work: PipelineSteps, pool: ThreadPoolExecutor) -> None:
        self._work = work
        self._pool = pool
        self._claiming: Future[ClaimedBatch | None] | None = pool.submit(work.claim)
        self._settling: Future[None] | None = None
        self._accepted: Mapping[str, Collection[str]] = _NONE
        self._outage: BrokerError | None = None

    def run(self) -> None:
        while self._outage is None and (claimed := self._next()) is not None:
            if self._work.stopped():
                self._work.release(claimed, error=None)
                return
            sent = self._work.send(claimed, accepted=self._accepted)
            # What was sent is settled also where the batch before could not be, or it would be sent a second time.
            try:
                self.end_settling()
            finally:
                self._settling = self._pool.submit(self._work.settle, sent)
            self._accepted, self._outage = sent.accepted, sent.outage

    def end_settling(self) -> None:
        """Wait until the batch before is settled."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.result()

    def end_claiming(self) -> None:
        """Release a batch that was claimed ahead and will not be sent."""
        claiming, self._claiming = self._claiming, None
        claimed = claiming.result() if claiming is not None else None
        if claimed is not None:
            self._work.release(claimed, error=self._outage)

    def _next(self) -> ClaimedBatch | None:
        claiming, self._claiming = self._claiming, None
        claimed = claiming.result() if claiming is not None else None
        if claimed is not None:
            self._claiming = self._pool.submit(self._work.claim)
        return claimed


class PermittedBatches:
    """The steps of run_pipeline(), under permits. A permit is settled exactly once: by the send, by the release, or at
    once if nothing was claimed under it.
    """

    def __init__(self, source: Source, *, rows: int) -> None:
        """`rows`: those of a batch."""
        self.refused = False
        """Whether the gate refused the last permit: the broker may not be asked now."""
        self._source = source
        self._rows = rows
        self._permits: dict[str, Permit] = {}

    def claim(self, claim: Callable[[int], ClaimedBatch | None]) -> ClaimedBatch | None:
        """Call `claim` with the rows of a permit; returns what it claimed, None for nothing or without a permit."""
        permit = self._source.gate.permit(self._rows)
        self.refused = permit is None
        if permit is None:
            return None
        try:
            claimed = claim(permit.rows)
        except BaseException:
            self._source.gate.settle(permit, None)
            raise
        if claimed is None or not claimed.rows:
            self._source.gate.settle(permit, None)
            return None
        self._permits[claimed.token] = permit
        return claimed

    def send(self, claimed: ClaimedBatch, *, accepted: Mapping[str, Collection[str]]) -> SentBatch:
        """Send a claim, and tell the gate how the broker answered."""
        answer = None
        try:
            sent = self._source.batches.send(claimed, accepted=accepted)
            answer = sent.answer
        finally:
            self._source.gate.settle(self._permits.pop(claimed.token), answer)
        return sent

    def release(self, claimed: ClaimedBatch, *, error: BrokerError | None) -> None:
        """Give a claim back that was not sent."""
        self._source.gate.settle(self._permits.pop(claimed.token), None)
        self._source.batches.release(claimed, error=error)
