"""The timing store of the outbox on Redis: when rows are due, in one sorted set a slot."""

from broker_adapter.redis.timing_store.redis_timing_store import open_timing_store

__all__ = ["open_timing_store"]
