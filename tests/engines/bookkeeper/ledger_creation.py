"""Waits for a client of this project's to know of enough bookies for a ledger, after some were started again."""

from __future__ import annotations

from outbox_broker.segments.ledgers import LedgerFailed, Ledgers
from tests.outbox_broker.cluster.conftest import eventually

NOT_ENOUGH_BOOKIES = "BKNotEnoughBookiesException"


def wait_until_ledgers_can_be_made(ledgers: Ledgers) -> None:
    """Wait until it can, and its bookies take an entry: a bookie that has registered is known to ZooKeeper, which tells
    each client in its own time, and one that had two registrations loses its address in the client for a moment.

    Nodes need not wait, since they open a shard again that could not be opened.
    """

    def is_made() -> bool:
        try:
            writer = ledgers.begin_create({})()
            writer.append(b"an entry")
            writer.confirm(1)
        except LedgerFailed as error:
            if NOT_ENOUGH_BOOKIES not in str(error):
                raise
            return False
        writer.begin_close()()
        ledgers.delete([writer.ledger_id])
        return True

    eventually(is_made, what="a ledger on as many bookies as it needs")
