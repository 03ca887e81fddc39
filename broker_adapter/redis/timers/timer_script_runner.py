"""Runs the timer scripts within the time-out of one request, and knows each topic's slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from broker_adapter.redis.errors import code_of, exception_for
from broker_adapter.redis.script_sender import Deadline, ScriptCall, ScriptSender
from broker_adapter.redis.timers.slot_scripts import FIRE, GROUP_CONFIG, MOVES_MAX, REGISTER, UNREGISTER, SlotScripts
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, BrokerRefused, StorageFailed

SLOTS_DEFAULT: Final = 1


class TimerScriptRunner:
    """Thread-safe. Each method ends within the time-out, and raises BrokerError."""

    def __init__(
        self,
        sender: ScriptSender,
        scripts: SlotScripts,
        *,
        replicas: Callable[[Deadline], int],
        slots: int | None,
        timeout_ms: int,
        clock: Clock,
    ) -> None:
        """`replicas`: how many must have what is durable. `slots`: of new topics, and demanded of all; None: 1 for new
        ones, and any.
        """
        self.scripts = scripts
        self._sender = sender
        self._replicas = replicas
        self._slots = slots
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._slots_of: dict[str, int] = {}

    def run(self, calls: Sequence[ScriptCall], *, durable: bool = False) -> list[Any]:
        """The answers, in order; durable ones once replicas have them. Raises the first error."""
        self.try_to_run(calls, durable=durable)
        for call in calls:
            if isinstance(call.outcome, Exception):
                raise self.raised(call) from call.outcome
        return [call.outcome for call in calls]

    def try_to_run(self, calls: Sequence[ScriptCall], *, durable: bool = False, repeated_ms: int | None = None) -> None:
        """Run the calls; each keeps its own answer or error. `repeated_ms`: for how long they are sent again to a
        cluster that moves slots or elects a master; None: until the time-out.
        """
        deadline = Deadline(self._clock, self._timeout_ms)
        self._sender.send(
            calls,
            deadline,
            replicas=self._replicas(deadline) if durable else 0,
            repeated_until=None if repeated_ms is None else Deadline(self._clock, repeated_ms),
        )

    def raised(self, call: ScriptCall) -> BrokerError:
        """The error of ours that the outcome of a failed call stands for."""
        error = call.outcome
        if isinstance(error, BrokerError):
            return error
        if is_no_group(error):
            return BrokerRefused(f"there is no consumer group with the key {call.keys[GROUP_CONFIG]}")
        return exception_for(error, addresses=self._sender.addresses)

    def dispatch_due(self, topic: str, slot: int) -> ScriptCall:
        """The call that moves what is due to the log."""
        return self.scripts.of_slot(FIRE, topic, slot, [MOVES_MAX, self._clock.now_ms()])

    def slots_of(self, topic: str) -> int:
        """Returns the topic's number of slots; a new topic is registered. Raises StorageFailed if it differs from the
        number in this broker's URL.
        """
        slots = self._slots_of.get(topic)
        if slots is None:
            wanted_slots = self._slots or SLOTS_DEFAULT
            register = ScriptCall(script=REGISTER, keys=[self.scripts.topics_key], arguments=[topic, wanted_slots])
            [slots] = self.run([register], durable=True)
            self._remember({topic: slots})
        if self._slots not in {None, slots}:
            raise StorageFailed(
                f"topic {topic} has {slots} slots, which cannot change, and the broker's URL says slots={self._slots}: "
                "leave that out, or publish to another topic"
            )
        return slots

    def known_slots_of(self, topic: str) -> int | None:
        """The same, None where there is no such topic."""
        if topic not in self._slots_of:
            self.topics()
        return self._slots_of.get(topic)

    def unregister(self, topic: str) -> None:
        """Forget a topic, whose slots are removed. Other processes remember how many they were until they end."""
        self.run([ScriptCall(script=UNREGISTER, keys=[self.scripts.topics_key], arguments=[topic])], durable=True)
        with self._lock:
            self._slots_of = {name: slots for name, slots in self._slots_of.items() if name != topic}

    def topics(self) -> list[str]:
        """All topics, sorted."""
        return sorted(self.slots_of_topics())

    def slots_of_topics(self) -> dict[str, int]:
        """The number of slots of each topic that there is."""
        key = self.scripts.topics_key
        deadline = Deadline(self._clock, self._timeout_ms)
        slots_by_topic: Any = self._sender.until_answered(lambda servers: servers.node_of(key).hgetall(key), deadline)
        topics = {name.decode(): int(slots) for name, slots in slots_by_topic.items()}
        self._remember(topics)
        return topics

    def _remember(self, topics: dict[str, int]) -> None:
        with self._lock:
            self._slots_of = {**self._slots_of, **topics}


def is_no_group(error: object) -> bool:
    """Whether a script answered that its group was not declared."""
    return isinstance(error, ResponseError) and code_of(error) == "NOGROUP"
