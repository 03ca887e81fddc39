"""Batch after batch, with the next one claimed and the last one settled while one is being sent.

The steps wait for different things - the database, the broker, the database again - so that side by side they take as
long as the slowest of them, and not as all together. At most three batches are in hand. The first batch goes alone: a
broker that is out is found with nothing else claimed, and a single batch, which is all that there mostly is, costs no
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

from compensator.work.claim_and_relay import Claimed
from compensator.work.poison_rows import Sent
from outbox_core.common.errors import BrokerError

_NONE: Mapping[str, Collection[str]] = {}


class PipelineSteps(Protocol):
    """Who claims, sends and settles. Each step is called by one thread at a time, different ones side by side."""

    def claim(self) -> Claimed | None:
        """The next batch; None: there is none, or none may be claimed now."""

    def send(self, claimed: Claimed, *, accepted: Mapping[str, Collection[str]]) -> Sent:
        """Send a batch; `accepted`: what the broker took of the batch before, whose rows may still stand."""

    def settle(self, sent: Sent) -> None:
        """Write down what became of a batch."""

    def release(self, claimed: Claimed, *, error: BrokerError | None) -> None:
        """Give a batch back unsent."""

    def more(self) -> bool:
        """Whether another claim is likely to find something."""

    def stopped(self) -> bool:
        """Whether what is claimed is not to be sent any more."""


def work_off(work: PipelineSteps) -> None:
    """Work until there is nothing more, the broker is out, or it is stopped. Raises what the steps raise, once
    everything that was in hand is settled, released or - where that failed too - left to its lease.
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
    """Three batches at most: one that is being claimed, one sent, one settled."""

    def __init__(self, work: PipelineSteps, pool: ThreadPoolExecutor) -> None:
        self._work = work
        self._pool = pool
        self._claiming: Future[Claimed | None] | None = pool.submit(work.claim)
        self._settling: Future[None] | None = None
        self._accepted: Mapping[str, Collection[str]] = _NONE
        self._outage: BrokerError | None = None

    def run(self) -> None:
        while self._outage is None and (claimed := self._next()) is not None:
            if self._work.stopped():
                self._work.release(claimed, error=None)
                return
            sent = self._work.send(claimed, accepted=self._accepted)
            self.end_settling()
            self._settling = self._pool.submit(self._work.settle, sent)
            self._accepted, self._outage = sent.accepted, sent.outage

    def end_settling(self) -> None:
        """Wait for the batch before."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.result()

    def end_claiming(self) -> None:
        """What was claimed ahead and is not going to be sent goes back, untried."""
        claiming, self._claiming = self._claiming, None
        claimed = claiming.result() if claiming is not None else None
        if claimed is not None:
            self._work.release(claimed, error=self._outage)

    def _next(self) -> Claimed | None:
        claiming, self._claiming = self._claiming, None
        claimed = claiming.result() if claiming is not None else None
        if claimed is not None:
            self._claiming = self._pool.submit(self._work.claim)
        return claimed
