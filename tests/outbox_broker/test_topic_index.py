"""A topic's index: where what is durable ends, and how much is looked at to say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_broker.log.topic_index import BlockPlace, Runs, TopicIndex
from outbox_core.common.errors import StorageFailed

SIZE_BYTES = 100


class NoBlocks:
    """Of an index without sealed segments."""

    def load(self, place: BlockPlace) -> Runs:
        """Never asked."""
        raise StorageFailed(f"there is no block {place}")


def index_of(counts: list[int]) -> TopicIndex:
    """Runs of so many messages, each run SIZE_BYTES long."""
    index = TopicIndex("orders", NoBlocks())
    for number, count in enumerate(counts):
        index.place(count, number * SIZE_BYTES, SIZE_BYTES, ready_at_ms=number)
    return index


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(0, 13 * SIZE_BYTES))
def test_what_is_durable_ends_before_the_first_run_that_is_not(counts: list[int], durable_end: int) -> None:
    index = index_of(counts)

    assert index.durable_end(durable_end) == sum(counts[: durable_end // SIZE_BYTES])
    assert index.durable_end(durable_end) == index.visible_end(0, count_max=index.end, durable_end=durable_end)


def test_sequences_whose_records_are_gone_hide_nothing_that_is_not_durable() -> None:
    index = index_of([1, 1])
    index.skip_to(5, ready_at_ms=2)
    index.place(1, 2 * SIZE_BYTES, SIZE_BYTES, ready_at_ms=3)

    assert [index.durable_end(count * SIZE_BYTES) for count in range(4)] == [0, 1, 5, 6]


def test_of_many_runs_those_that_are_not_durable_are_looked_at_and_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of([1] * 1_000)
    row, looked_at = Runs.row, []
    monkeypatch.setattr(Runs, "row", lambda runs, number: looked_at.append(number) or row(runs, number))

    assert index.durable_end(998 * SIZE_BYTES) == 998

    assert looked_at == [999, 998, 997]
