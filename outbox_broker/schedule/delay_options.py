"""The bounds of one schedule: memory, log, batches, and how long what is remembered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayOptions:
    """Bounds of one schedule. Memory and log are flushed to buckets where one of their bounds is reached."""

    memory_bytes_max: int = 32 * 1024 * 1024
    """Payloads of messages in memory that are in no bucket yet."""
    memory_messages_max: int = 65_536
    """Messages in memory that are in no bucket yet, with those that fired before they were in one."""
    log_bytes_max: int = 64 * 1024 * 1024
    """Bytes of the log behind its checkpoint."""
    batch_messages_max: int = 500
    """Messages in a batch that is handed out."""
    batch_bytes_max: int = 4 * 1024 * 1024
    """Payloads in a batch that is handed out; its last message may go beyond."""
    hand_outs_max: int = 8
    """Batches that are handed out and not settled."""
    expand_messages_max: int = 8_192
    """Messages that a step of housekeeping re-files; a run is re-filed whole."""
    cancels_remembered_max: int = 100_000
    """Cancels that are remembered, so that they stop a message that comes later."""
    dedup_messages: int = 131_072
    """So many of the newest ids at least are known, also after a restart, when they come again."""
    fired_memory_ms: int = 24 * 3_600_000
    """How long the id index keeps messages after their due time, where a merge leaves out what has fired."""
    index_pieces_max: int = 64
    """Pieces of the id index, each of which a look-up reads; more are merged."""
    index_merged_pieces_max: int = 48
    """Pieces of the id index that one merge makes into one."""
