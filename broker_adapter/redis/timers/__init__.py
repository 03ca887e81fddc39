"""The timer store: messages in sorted sets by the time they are due, pulled and settled by scripts; the whole port."""

from broker_adapter.redis.timers.timer_broker import open_timers

__all__ = ["open_timers"]
