"""open_timers: puts a TimerBroker together."""

from __future__ import annotations

from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.redis.master_settings import MasterSettings
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.redis_publisher import RedisPublisher
from broker_adapter.redis.script_sender import ScriptSender
from broker_adapter.redis.timers.slot_scripts import SlotScripts
from broker_adapter.redis.timers.timer_broker import TimerBroker
from broker_adapter.redis.timers.timer_messages import TimerStore
from broker_adapter.redis.timers.timer_script_runner import TimerScriptRunner
from broker_adapter.redis.timers.topic_wakeups import TopicWakeups
from outbox_core.common.clock import Clock


def open_timers(
    sender: ScriptSender, options: RedisOptions, *, strict: bool, timeout_ms: int, clock: Clock
) -> TimerBroker:
    """A broker on the timer store; does no I/O until it is used."""
    masters = MasterSettings(sender, options, clock=clock)
    scripts = SlotScripts(options.prefix)
    runner = TimerScriptRunner(
        sender,
        scripts,
        replicas=masters.replicas_to_wait_for,
        slots=options.slots,
        timeout_ms=timeout_ms,
        clock=clock,
    )
    store = TimerStore(runner, window_ms=options.window_ms, clock=clock)
    publishing = PublishOnlyBroker(
        RedisPublisher(sender, store, masters, options, clock=clock), strict=strict, timeout_ms=timeout_ms, clock=clock
    )
    wakeups = TopicWakeups(sender, scripts, clock=clock)
    return TimerBroker(publishing, runner, wakeups, window_ms=options.window_ms, clock=clock)
