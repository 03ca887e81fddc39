"""PermittedBatches: claims, sends and releases batches of one source, each under a permit of its broker's gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from compensator.admission.circuit_breaker import Permit
from compensator.work.claim_and_relay import ClaimedBatch
from compensator.work.poison_row_isolation import SentBatch
from compensator.work.source import Source
from outbox_core.common.errors import BrokerError


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
