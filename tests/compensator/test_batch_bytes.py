"""How many rows the compensator reads at once, before and after it knows how large their bodies are."""

from __future__ import annotations

import pytest

from compensator.work.claim_and_relay import FIRST_ROWS, BatchBytes
from outbox.store.row import OutboxRow, publish_row
from outbox_core import Message
from outbox_core.messages.ids import new_message_id


def rows(count: int, *, body_bytes: int) -> list[OutboxRow]:
    return [publish_row(Message(id=new_message_id(), topic="sales", body=bytes(body_bytes))) for _ in range(count)]


def test_rows_of_unknown_size_are_few() -> None:
    size = BatchBytes(bytes_max=1_000)

    assert size.rows([], rows_max=500) == FIRST_ROWS
    assert size.rows([], rows_max=5) == 5


def test_a_batch_takes_the_rows_that_fit_the_bytes_left() -> None:
    size = BatchBytes(bytes_max=1_000)

    assert size.rows(rows(4, body_bytes=100), rows_max=500) == 6
    assert size.rows(rows(10, body_bytes=100), rows_max=500) == 0
    assert size.rows(rows(4, body_bytes=100), rows_max=7) == 3


@pytest.mark.parametrize("count", [1, FIRST_ROWS])
def test_rows_without_a_body_take_no_room(count: int) -> None:
    size = BatchBytes(bytes_max=1_000)
    read = rows(count, body_bytes=0)

    assert size.rows(read, rows_max=500) == 500 - count
    size.learn(read)
    assert size.rows([], rows_max=500) == 500


def test_a_new_batch_expects_the_size_of_the_last_and_reads_one_row_at_least() -> None:
    size = BatchBytes(bytes_max=1_000)

    size.learn(rows(2, body_bytes=100))
    assert size.rows([], rows_max=500) == 10
    size.learn(rows(1, body_bytes=5_000))
    assert size.rows([], rows_max=500) == 1
    assert size.rows([], rows_max=0) == 0


def test_larger_rows_count_at_once_and_smaller_ones_gradually() -> None:
    size = BatchBytes(bytes_max=1_200)

    size.learn(rows(1, body_bytes=100))
    size.learn(rows(1, body_bytes=400))
    assert size.rows([], rows_max=500) == 3
    size.learn(rows(1, body_bytes=100))
    assert size.rows([], rows_max=500) == 4
