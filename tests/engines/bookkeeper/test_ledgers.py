"""What BookKeeper promises to a log that is kept in its ledgers: acknowledged entries stay, and there is one writer."""

from __future__ import annotations

import pytest

from tests.engines.bookkeeper.client import LedgerClient, LedgerError
from tests.engines.bookkeeper.cluster import BookKeeperCluster


def entries(first: int, last: int) -> list[bytes]:
    """Entries of different lengths that tell their place."""
    return [b"%d " % number * (1 + number % 50) for number in range(first, last)]


def test_a_closed_ledger_has_every_entry_in_the_order_of_writing(client: LedgerClient, successor: LedgerClient) -> None:
    bodies = [*entries(0, 1_000), b"", b"x" * 500_000]
    writer = client.create()

    writer.append(*bodies)
    writer.close()

    assert successor.is_closed(writer.ledger_id)
    assert successor.read(writer.ledger_id) == bodies


def test_a_recovery_fences_the_writer_and_reads_what_was_acknowledged(
    client: LedgerClient, successor: LedgerClient
) -> None:
    writer = client.create()
    writer.append(*entries(0, 100))

    recovered = successor.recover(writer.ledger_id)

    assert recovered == entries(0, 100)
    assert successor.is_closed(writer.ledger_id)
    for body in (b"late", b"later"):
        with pytest.raises(LedgerError):
            writer.append(body)
    assert client.read(writer.ledger_id) == entries(0, 100)


def test_entries_acknowledged_during_a_recovery_are_part_of_the_ledger(
    client: LedgerClient, successor: LedgerClient
) -> None:
    bodies = entries(0, 1_000)
    writer = client.create()

    appends = writer.send(bodies)
    recovered = successor.recover(writer.ledger_id)
    acknowledged = [append.is_acknowledged() for append in appends]

    count = sum(acknowledged)
    assert acknowledged == [True] * count + [False] * (len(bodies) - count)
    assert recovered == bodies[: len(recovered)]
    assert len(recovered) >= count
    with pytest.raises(LedgerError):
        writer.append(b"late")


def test_a_wrong_password_neither_reads_the_ledger_nor_fences_its_writer(
    client: LedgerClient, successor: LedgerClient
) -> None:
    writer = client.create()
    writer.append(b"before")

    with pytest.raises(LedgerError, match="BKUnauthorizedAccessException"):
        successor.recover(writer.ledger_id, password=b"another password")

    writer.append(b"after")
    assert successor.recover(writer.ledger_id) == [b"before", b"after"]


def test_acknowledged_entries_outlive_the_kill_9_of_one_bookie_and_then_of_all(
    cluster: BookKeeperCluster, client: LedgerClient, successor: LedgerClient
) -> None:
    # Three copies, of which two are enough for an acknowledgement.
    writer = client.create()
    writer.append(*entries(0, 100))

    lost, *others = writer.bookie_ids
    cluster.kill9(lost)
    writer.append(*entries(100, 200))
    recovered = successor.recover(writer.ledger_id)
    for bookie in others:
        cluster.kill9(bookie)
    cluster.restore()

    assert recovered == entries(0, 200)
    assert client.read(writer.ledger_id) == entries(0, 200)


def test_ledgers_are_found_by_their_custom_metadata_until_they_are_deleted(
    client: LedgerClient, successor: LedgerClient
) -> None:
    writers = {epoch: client.create({"shard": b"7", "epoch": epoch}) for epoch in (b"1", b"2")}
    ids = {epoch: writer.ledger_id for epoch, writer in writers.items()}

    found = {
        metadata["epoch"]: ledger_id
        for ledger_id in successor.ledger_ids()
        if (metadata := successor.custom_metadata(ledger_id)).get("shard") == b"7"
    }
    successor.delete(ids[b"1"])

    assert found == ids
    assert ids[b"1"] not in successor.ledger_ids()
    assert ids[b"2"] in successor.ledger_ids()
    with pytest.raises(LedgerError, match="BKNoSuchLedgerExistsOnMetadataServerException"):
        successor.recover(ids[b"1"])
