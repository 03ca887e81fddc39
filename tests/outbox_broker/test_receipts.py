"""Receipts of a request are read as runs, and no receipt is read as another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.group.receipt import Receipt, receipts_of, runs_of

runs = st.tuples(
    st.sampled_from(["orders", "orders.paid"]), st.sampled_from(["g", "h"]), st.integers(0, 30), st.integers(1, 40),
    st.integers(1, 3), st.integers(0, 2),
)  # fmt: skip
odd = st.sampled_from(
    ["", "orders", "orders/g/1", "orders/g/1.1.0\n", "orders/g/01.1.0", "orders/g/\u0661.1.0", "orders/g/-1.1.0"]
)


@given(st.lists(runs.map(lambda one: _texts(*one)) | odd.map(lambda one: [one]), max_size=12))
def test_runs_tell_every_receipt_in_its_place_and_nothing_else(pieces: list[list[str]]) -> None:
    receipts = [one for piece in pieces for one in piece]

    told = {
        run.index + number: Receipt(run.topic, run.group, run.first + number, run.delivery, run.generation)
        for run in runs_of(receipts)
        for number in range(run.count)
    }

    assert told == {place: parsed for place, one in enumerate(receipts) if (parsed := Receipt.parse(one)) is not None}


def test_receipts_of_one_hand_out_are_one_run() -> None:
    receipts = _texts("orders", "g", 95, 1_000, 7, 0)

    [run] = runs_of(receipts)

    assert (run.first, run.end, run.index) == (95, 1_095, 0)


def _texts(topic: str, group: str, first: int, count: int, delivery: int, generation: int) -> list[str]:
    return receipts_of(topic, group, first=first, count=count, delivery=delivery, generation=generation)
