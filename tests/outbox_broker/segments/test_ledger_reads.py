"""How many entries a request for a ledger's entries asks for: bounded bytes, and few requests for small entries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outbox_broker.segments.ledger_reads import (
    REQUEST_BYTES_MAX,
    REQUEST_ENTRIES_MAX,
    next_size,
    read_entries,
)
from outbox_broker.segments.ledger_records import CHUNK_BYTES_MAX
from tests.outbox_broker.segments.memory_ledgers import Calls, MemoryLedgers

SMALL = b"s" * 100
MEDIUM = b"m" * 300_000
LARGE = b"l" * (CHUNK_BYTES_MAX + 1)


def written(ledgers: MemoryLedgers, entries: Sequence[bytes]) -> int:
    writer = ledgers.begin_create({})()
    for entry in entries:
        writer.append(entry)
    writer.confirm(len(entries))
    ledgers.calls = Calls()
    return writer.ledger_id


@pytest.mark.parametrize(
    "entries",
    [
        [LARGE] * 40,
        [*[SMALL] * 1_000, *[LARGE] * 64],
        [*[SMALL] * 255, LARGE, *[SMALL] * 300, *[MEDIUM] * 100, *[SMALL] * 300],
        [*[LARGE] * 3, *[SMALL] * 20],
        [SMALL],
        [],
    ],
    ids=["large", "large_behind_small", "mixed", "small_behind_large", "one", "none"],
)
def test_a_request_for_several_entries_returns_four_mebibytes_at_the_most(entries: Sequence[bytes]) -> None:
    ledgers = MemoryLedgers()
    ledger_id = written(ledgers, entries)

    found = list(read_entries(ledgers, ledger_id, count=len(entries)))

    assert found == entries
    assert [one for one in ledgers.read_sizes if one[0] > 1 and one[1] > REQUEST_BYTES_MAX] == []


def test_small_entries_are_read_by_the_256() -> None:
    ledgers = MemoryLedgers()
    ledger_id = written(ledgers, [SMALL] * 20_000)

    assert sum(1 for _ in read_entries(ledgers, ledger_id, count=20_000)) == 20_000

    assert ledgers.calls.counts["read"] <= 20_000 / REQUEST_ENTRIES_MAX + 5
    assert ledgers.calls.counts["length"] <= 20_000 / REQUEST_ENTRIES_MAX + 5


def test_large_entries_are_read_once_each_and_nothing_else_is() -> None:
    ledgers = MemoryLedgers()
    ledger_id = written(ledgers, [LARGE] * 40)

    assert sum(1 for _ in read_entries(ledgers, ledger_id, count=40)) == 40

    assert (ledgers.calls.counts["read"], ledgers.calls.counts["length"]) == (40, 1)


@pytest.mark.parametrize(
    ("size", "size_bytes", "expected"),
    [
        (16, 1_600, 32),
        (256, 25_600, 256),
        (1, 0, 2),
        (1, CHUNK_BYTES_MAX + 1, 1),
        (2, REQUEST_BYTES_MAX + 1, 1),
        (256, 232 * len(LARGE), 1),
        (13, 13 * len(MEDIUM), 13),
        (100, 4 * REQUEST_BYTES_MAX, 25),
    ],
)
def test_the_next_request_is_twice_as_large_or_as_large_as_its_bytes_allow(
    size: int, size_bytes: int, expected: int
) -> None:
    assert next_size(size, size_bytes) == expected
