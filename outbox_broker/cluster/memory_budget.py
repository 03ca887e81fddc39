"""Divides a node's memory for messages among the shards that it hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox_core.common.errors import ConfigurationError

FILL_MAX: Final = 1.25
"""Publishes to a shard wait for a flush at so many times the memory at which it is begun."""
SHARD_BYTES_MIN: Final = 256 * 1024
"""A shard flushes its memory to its buckets when it has this much, however many shards there are."""
_BYTES_PER_MESSAGE: Final = 512
_DEDUP_MESSAGES_MIN: Final = 2_048
_CANCELS_MIN: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMemory:
    """What one shard may have in memory that is not in its buckets yet, before it is flushed: publishes wait for the
    flush at FILL_MAX times as much.
    """

    bytes_max: int
    messages_max: int

    @property
    def log_bytes_max(self) -> int:
        """What its log may grow by behind a checkpoint: a takeover reads it. As much as the memory: so each flush of a
        full memory begins the log anew, though more came meanwhile, which the checkpoint repeats.
        """
        return self.bytes_max


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The limits of one node, for all of its shards together."""

    bytes_max: int = 128 * 1024 * 1024
    """Payload bytes of messages in memory that are not in a bucket yet."""
    dedup_messages: int = 1_048_576
    """Newest ids of a whole cluster that are recognised as duplicates."""
    cancels_remembered_max: int = 800_000
    """Cancels of a whole cluster that are remembered, so that they apply to messages that arrive later."""

    def __post_init__(self) -> None:
        if self.bytes_max < SHARD_BYTES_MIN:
            raise ConfigurationError(f"a node's memory is at least {SHARD_BYTES_MIN:,} bytes, not {self.bytes_max:,}")

    def share(self, *, hosted: int, shards: int) -> ShardMemory:
        """Returns the limit of each of the shards that this node hosts, of so many of the cluster.

        The memory of as many shards again is left to those that it may take over from a node that dies: if their limit
        fell then, publishes to them would wait for a flush first.
        """
        whole = self.bytes_max / max(1, min(2 * hosted, shards))
        bytes_max = max(SHARD_BYTES_MIN, int(whole / FILL_MAX))
        return ShardMemory(bytes_max=bytes_max, messages_max=bytes_max // _BYTES_PER_MESSAGE)

    def dedup_messages_of(self, shards: int) -> int:
        """Returns how many of the newest ids a shard of a cluster with so many shards recognises."""
        return max(_DEDUP_MESSAGES_MIN, self.dedup_messages // max(1, shards))

    def cancels_of(self, shards: int) -> int:
        """Returns how many cancels a shard of a cluster with so many shards remembers."""
        return max(_CANCELS_MIN, self.cancels_remembered_max // max(1, shards))
