"""How a node's memory is divided among its shards."""

from __future__ import annotations

import pytest

from outbox_broker.cluster.memory_budget import FILL_MAX, SHARD_BYTES_MIN, MemoryBudget

MIB = 1024 * 1024
SIZES = [(hosted, shards) for shards in (1, 2, 8, 64) for hosted in range(1, shards + 1)]


@pytest.mark.parametrize(("hosted", "shards"), SIZES)
def test_all_shards_of_a_node_together_stay_within_its_memory_also_after_it_took_over_as_many_again(
    hosted: int, shards: int
) -> None:
    budget = MemoryBudget(bytes_max=128 * MIB)
    share = budget.share(hosted=hosted, shards=shards)

    assert FILL_MAX * share.bytes_max * min(2 * hosted, shards) <= budget.bytes_max
    assert share.messages_max == share.bytes_max // 512
    assert share.log_bytes_max == share.bytes_max


def test_of_two_nodes_one_may_die_and_the_limit_of_a_shard_stays_the_same() -> None:
    budget = MemoryBudget(bytes_max=128 * MIB)

    assert budget.share(hosted=4, shards=8) == budget.share(hosted=8, shards=8)
    assert budget.share(hosted=4, shards=64).bytes_max > budget.share(hosted=8, shards=64).bytes_max


def test_a_shard_has_a_least_memory_however_many_there_are() -> None:
    assert MemoryBudget(bytes_max=MIB).share(hosted=64, shards=64).bytes_max == SHARD_BYTES_MIN
