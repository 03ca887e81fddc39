"""open_timers: puts a TimerBroker together."""

from __future__ import annotations

from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.redis.master_settings import MasterReports
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.redis_publisher import RedisPublisher
from broker_adapter.redis.script_sender import ScriptSender
from broker_adapter.redis.timers.slot_scripts import SlotScripts
from broker_adapter.redis.timers.timer_broker import TimerBroker
from broker_adapter.redis.timers.timer_messages import TimerStore
from broker_adapter.redis.timers.timer_script_runner import TimerCalls
from outbox_core.common.clock import SystemClock


def open_timers(sender: ScriptSender, options: RedisOptions, *, strict: bool, timeout_ms: int) -> TimerBroker:
    """A broker on the timer store; does no I/O until it is used."""
    clock = SystemClock()
    masters = MasterReports(sender, options)
    calls = TimerCalls(
        sender,
        SlotScripts(options.prefix),
        replicas=masters.replicas_to_wait_for,
        slots=options.slots,
        timeout_ms=timeout_ms,
        clock=clock,
    )
    store = TimerStore(calls, window_ms=options.window_ms, clock=clock)
    publishing = PublishOnlyBroker(
        RedisPublisher(sender, store, masters, options, clock=clock), strict=strict, timeout_ms=timeout_ms, clock=clock
    )
    return TimerBroker(publishing, calls, window_ms=options.window_ms, clock=clock)
