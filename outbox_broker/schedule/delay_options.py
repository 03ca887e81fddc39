"""Limits of one schedule: memory, log, batches, and retention of ids and cancels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOPIC_NAMES_MAX: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayOptions:
    """Limits of one schedule. Memory and log are flushed to buckets when one of their limits is reached, beside
    publishes, which wait at `fill_max` times as much.
    """

    memory_bytes_max: int = 32 * 1024 * 1024
    """Payload bytes of messages in memory that are not in a bucket yet."""
    memory_messages_max: int = 65_536
    """Messages in memory that are not in a bucket yet, including those dispatched before they were in one."""
    log_bytes_max: int = 64 * 1024 * 1024
    """Bytes of the log after its checkpoint."""
    arrivals_bytes_max: int = 256 * 1024 * 1024
    """Bytes of another log in which messages arrive, behind what the checkpoint has of it."""
    fill_max: float = 2.0
    """Publishes wait for a flush once memory or log is at so many times its limit."""
    batch_messages_max: int = 500
    """Messages in a dispatched batch."""
    batch_bytes_max: int = 4 * 1024 * 1024
    """Payload bytes in a dispatched batch; its last message may exceed the limit."""
    hand_outs_max: int = 8
    """Batches dispatched and not settled."""
    expand_messages_max: int = 8_192
    """Messages re-filed by one step of housekeeping; a run is re-filed whole."""
    expand_above_messages: int = 1_000
    """A bucket with more messages than this, which is what a run holds, is re-filed before its time begins. A smaller
    one is dispatched from where it is: its runs are each read when their first message is due, and files cost more."""
    bucket_writers_max: int = 320
    """Segments of buckets that are written to; above the 286 buckets that there can be, so that a bucket gets another
    segment only after an opening."""
    bucket_segments_max: int = 16
    """Segments of a bucket, above which small ones are merged: each opening begins another one."""
    cancels_remembered_max: int = 100_000
    """Cancels that are remembered, so that they apply to messages that arrive later."""
    dedup_messages: int = 131_072
    """At least this many of the newest ids are recognised as duplicates, also after a restart."""
    topic_names_max: int = TOPIC_NAMES_MAX
    """Topics of which names are kept in memory, as far as nothing is scheduled on them: clients can invent names."""
    fired_memory_ms: int = 24 * 3_600_000
    """How long the id index keeps messages after their due time; a merge drops older ones that were dispatched."""
    index_pieces_max: int = 64
    """Pieces of the id index, each of which a lookup reads; above this, pieces are merged."""
    index_merged_pieces_max: int = 48
    """Pieces of the id index that one merge combines."""
