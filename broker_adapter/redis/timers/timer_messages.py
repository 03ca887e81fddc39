"""Messages of the timer store: how they lie in a slot, how they are added, and the receipts of their deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import msgspec

from broker_adapter.redis.script_sender import Argument, ScriptCall
from broker_adapter.redis.timers.slot_scripts import ADD, slot_of
from broker_adapter.redis.timers.timer_script_runner import TimerScriptRunner
from outbox_core.common.clock import Clock
from outbox_core.messages.broker_port import Capability
from outbox_core.messages.message import Message, encode_packed

CAPABILITIES: Final = frozenset(
    {Capability.DEDUPLICATION, Capability.DELAY, Capability.CANCEL, Capability.PULL, Capability.ADMIN}
)


PACKED_BYTES_MAX: Final = 9
"""How many bytes MessagePack adds to a text or a number, at most."""


class TimerReceipt(msgspec.Struct, frozen=True):
    """Names one delivery; as text `topic/group/epoch/id`."""

    topic: str
    group: str
    epoch: str
    id: str

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Returns the parts of a receipt; None if it is not one of this kind of broker."""
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or not (parts[2].isascii() and parts[2].isdigit()):
            return None
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.topic}/{self.group}/{self.epoch}/{self.id}"


class TimerStore:
    """Messages as members of sorted sets, pulled by consumers of ours."""

    capabilities: frozenset[Capability] = CAPABILITIES
    """All but reading by offset."""

    def __init__(self, runner: TimerScriptRunner, *, window_ms: int, clock: Clock) -> None:
        self._runner = runner
        self._window_ms = window_ms
        self._clock = clock

    def place_of(self, message: Message) -> str:
        """Its topic and slot; asks the server about a topic that is new to this process."""
        return f"{message.topic}:{slot_of(message.id, self._runner.slots_of(message.topic))}"

    def value_bytes(self, message: Message) -> int:
        """A message's record is one value."""
        texts = [message.id, message.topic, message.key or "", *message.headers, *message.headers.values()]
        return len(message.body) + sum(len(text.encode()) + PACKED_BYTES_MAX for text in texts) + 5 * PACKED_BYTES_MAX

    def call(self, destination: str, messages: Sequence[Message]) -> ScriptCall:
        """The call that adds these messages to a slot."""
        topic, _, slot = destination.partition(":")
        scripts = self._runner.scripts
        arguments: list[Argument] = [
            self._window_ms, self._clock.now_ms(), scripts.wake_channel(topic)
        ]  # fmt: skip
        for message in messages:
            stored = message
            if not message.created_at_ms:
                stored = msgspec.structs.replace(message, created_at_ms=self._clock.now_ms())
            arguments += (message.id, max(0, message.deliver_at_ms or 0), encode_packed(stored))
        return scripts.of_slot(ADD, topic, int(slot), arguments)
