"""One pass over one message table: batch after batch until nothing is due. No schedule; the steps are batches'."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from sqlalchemy import Engine

from compensator.core.batch_totals import PassReport, add
from compensator.work.claim_and_relay import Batches, Claimed, ScanOptions, Walk
from compensator.work.pipeline import work_off
from compensator.work.poison_rows import Sent
from outbox.delivery.relay import RelayPolicy
from outbox.store.message_table import Backlog, MessageStore
from outbox_core.common.errors import BrokerError
from outbox_core.messages.broker_port import Broker

__all__ = ["PassReport", "Scan", "ScanOptions"]

BATCHES_PER_PASS_MAX: Final = 10_000


class Scan:
    """Passes over one table. Any number of these may run beside each other."""

    def __init__(
        self, *, engine: Engine, store: MessageStore, broker: Broker, policy: RelayPolicy, options: ScanOptions
    ) -> None:
        """`engine` should come from outbox.store.database.background_engine: READ COMMITTED, a pool of its own."""
        self._engine = engine
        self._table = store.table.name
        self._batch_rows = options.batch_rows
        self._batches = Batches(engine=engine, store=store, broker=broker, policy=policy, options=options)

    def run(self, *, stopping: threading.Event | None = None) -> PassReport:
        """One pass, until nothing is due, the broker is out, or `stopping` is set. Raises DatabaseUnavailable.

        After an outage the rest of the backlog stays as it is: no attempt is burnt on it.
        """
        one = _Pass(self._batches, self._table, batch_rows=self._batch_rows, stopping=stopping or threading.Event())
        work_off(one)
        return one.report

    def backlog(self) -> Backlog:
        """How the table stands. Raises DatabaseUnavailable, SchemaMissing."""
        return self._batches.backlog()


class _Pass:
    """One pass, as work_off() asks for it."""

    def __init__(self, batches: Batches, table: str, *, batch_rows: int, stopping: threading.Event) -> None:
        self.total = PassReport()
        self._batches = batches
        self._walks: Sequence[Walk] = [Walk(table)]
        self._batch_rows = batch_rows
        self._stopping = stopping
        self._begun = 0
        self._held = 0

    @property
    def report(self) -> PassReport:
        """What the pass came to."""
        return add(self.total, PassReport(held=self._held))

    def claim(self) -> Claimed | None:
        while self._walks and not self.stopped() and self._begun < BATCHES_PER_PASS_MAX:
            self._begun += 1
            claimed = self._batches.claim(self._walks, rows_max=self._batch_rows)
            self._walks = claimed.walks_left
            self._held += claimed.held
            if claimed.rows:
                return claimed  # else others were quicker with all of them: there may be more
        return None

    def send(self, claimed: Claimed, *, accepted: Mapping[str, Collection[str]]) -> Sent:
        return self._batches.send(claimed, accepted=accepted)

    def settle(self, sent: Sent) -> None:
        self.total = add(self.total, self._batches.settle(sent))

    def release(self, claimed: Claimed, *, error: BrokerError | None) -> None:
        self._batches.release(claimed, error=error)

    def more(self) -> bool:
        return bool(self._walks)

    def stopped(self) -> bool:
        return self._stopping.is_set()
