"""Redis, one server or a cluster: streams and timers behind the Broker port, and the timing store of the outbox."""

from broker_adapter.redis.open_broker import open_broker
from broker_adapter.redis.timing_store import open_timing_store

__all__ = ["open_broker", "open_timing_store"]
