"""Rows that are claimed shortly before they are due: when they may be sent, and which are put back."""

from __future__ import annotations

import pytest

from compensator.work.claim_and_relay import due_soon
from outbox.store.row import OutboxRow
from outbox.store.schema import RowKind

AHEAD_MS = 15


def row(deliver_in_us: int | None) -> OutboxRow:
    return OutboxRow(
        id="m", kind=RowKind.PUBLISH, topic="t", body=b"", body_sha256="", deliver_in_us=deliver_in_us
    )  # fmt: skip


@pytest.mark.parametrize(
    ("deliver_in_us", "ready_in_us", "due_in_ms"),
    [
        ([], [], 0),
        ([None, -5, 0], [None, -5, 0], 0),
        ([1], [0], 1),
        ([7_001, 2_000, -1], [0, 0, -1], 8),
        ([15_000], [0], 15),
        ([15_001], [15_001], 0),
        ([15_001, 14_000], [15_001, 0], 14),
    ],
)
def test_rows_wait_for_the_last_of_those_that_are_due_soon_and_later_ones_are_put_back(
    deliver_in_us: list[int | None], ready_in_us: list[int | None], due_in_ms: int
) -> None:
    ready, waiting_ms = due_soon([row(us) for us in deliver_in_us], ahead_ms=AHEAD_MS)

    assert [one.deliver_in_us for one in ready] == ready_in_us
    assert waiting_ms == due_in_ms
