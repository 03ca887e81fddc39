"""Implements the Broker port on the timer store."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from broker_adapter.publishing.publish_only_broker import PublishOnlyBroker
from broker_adapter.redis.durability_inspection import MasterSettings
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.redis_publisher import RedisPublisher
from broker_adapter.redis.script_sender import Argument, Script, ScriptCall, ScriptSender
from broker_adapter.redis.timers.group_admin import RedisGroupAdmin, group_arguments
from broker_adapter.redis.timers.slot_scripts import (
    ACK,
    CANCEL,
    EXPIRE,
    EXTEND,
    MOVES_MAX,
    NACK,
    TAKE,
    SlotScripts,
    slot_of,
)
from broker_adapter.redis.timers.timer_messages import TimerReceipt, TimerStore
from broker_adapter.redis.timers.timer_script_runner import TimerScriptRunner, is_no_group
from broker_adapter.redis.timers.topic_wakeups import IDLE_MS, TopicWakeups
from outbox_core.common.clock import Clock
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages import limits
from outbox_core.messages.broker_port import BrokerAdmin, Capability, Inspection
from outbox_core.messages.failure_history import EXPIRED, REFUSED
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
    check_group,
    check_message_id,
    check_topic,
    decode_record,
)

REPEATED_MS: Final = 1_000
"""For so long a pull asks slots again that are being moved, or have no master: the deliveries of others wait for it."""
PULL_BYTES_MAX: Final = limits.BODY_BYTES_MAX
"""Of bodies in a pull, divided among the slots that it asks: each of them may deliver one message beyond its part."""
_STALE: Final = 3
_ACKS: Final = {0: AckStatus.UNKNOWN, 1: AckStatus.ACKED, 2: AckStatus.ALREADY_ACKED, _STALE: AckStatus.STALE}
_NACKS: Final = {1: NackStatus.REQUEUED, 2: NackStatus.DEAD, _STALE: NackStatus.STALE}
_EXTENDS: Final = {1: ExtendStatus.EXTENDED, _STALE: ExtendStatus.STALE}


class TimerBroker:
    """A Broker that publishes, schedules, delivers and settles in Redis. Thread-safe; does no I/O before it is used.

    Messages of one slot are delivered in the order in which they came or were due; a topic of one slot, the default, so
    is in order as a whole.
    """

    def __init__(
        self,
        publishing: PublishOnlyBroker,
        runner: TimerScriptRunner,
        wakeups: TopicWakeups,
        *,
        window_ms: int,
        clock: Clock,
    ) -> None:
        self._publishing = publishing
        self._runner = runner
        self._wakeups = wakeups
        self._window_ms = window_ms
        self._clock = clock
        self._admin = RedisGroupAdmin(runner)
        self._suspected: dict[tuple[str, str], int] = {}
        """By topic and group the slot that the next pull asks alone: its messages may have ended a consumer."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of this store."""
        return self._publishing.capabilities

    @property
    def admin(self) -> BrokerAdmin:
        """Groups, figures, dead letters."""
        return self._admin

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch; see PublishOnlyBroker for the inspection before it."""
        return self._publishing.publish(batch)

    def inspect(self, topics: Sequence[str] = ()) -> Inspection:
        """Ask the servers about their settings."""
        return self._publishing.inspect(topics)

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = limits.INVISIBLE_MS_DEFAULT,
        begins: bool = False,
    ) -> list[Delivery]:
        """Take what is ready, waiting up to `wait_ms` for the first; at most 1,000 messages and 60 s a call. A group
        that is new begins with the earliest message. What some slots delivered is returned though others had an outage.
        """
        topic, group = check_topic(topic), check_group(group)
        _check_pull(max_messages=max_messages, wait_ms=wait_ms, invisible_ms=invisible_ms)
        end_ms = self._clock.monotonic_ms() + min(wait_ms, limits.PULL_WAIT_MS_MAX)
        room = min(max_messages, limits.PULL_MESSAGES_MAX)
        wakeup = self._wakeups.of(topic)
        while True:
            seen = wakeup.seen
            deliveries, next_ms = self._take(topic, group, room=room, invisible_ms=invisible_ms, begins=begins)
            left_ms = end_ms - self._clock.monotonic_ms()
            if deliveries or left_ms <= 0 or not wakeup.wait(seen, timeout_ms=min(next_ms, left_ms)):
                return deliveries

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries; `already_acked` is remembered for as long as ids are."""
        return [_ACKS[code] for code in self._settle(ACK, receipts, otherwise=0)]

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back; after a lost connection BrokerUnavailable is raised, and they may have been."""
        head: list[Argument] = [
            "" if delay_ms is None else max(0, delay_ms),
            (reason or REFUSED)[: limits.REASON_CHARS_MAX],
            int(counts),
        ]
        return [_NACKS[code] for code in self._settle(NACK, receipts, head, otherwise=_STALE)]

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible for `invisible_ms` from now on; `begun`: they are about to be handled."""
        _check_pull(max_messages=1, wait_ms=0, invisible_ms=invisible_ms)
        return [_EXTENDS[code] for code in self._settle(EXTEND, receipts, [invisible_ms, int(begun)], otherwise=_STALE)]

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel the scheduled messages of these ids, on all topics. `unknown`: on no topic that there is yet; such an
        id is remembered there, and dropped if it comes within the window.
        """
        for message_id in message_ids:
            check_message_id(message_id)
        codes: dict[str, set[int]] = {message_id: set() for message_id in message_ids}
        named: list[list[str]] = []
        calls: list[ScriptCall] = []
        for topic, slots in self._runner.slots_of_topics().items() if message_ids else ():
            for slot, ids in _by_slot(message_ids, slots).items():
                named.append(ids)
                calls.append(self._runner.scripts.of_slot(CANCEL, topic, slot, [self._window_ms, *ids]))
        for ids, answer in zip(named, self._runner.run(calls, durable=True) if calls else (), strict=True):
            for message_id, code in zip(ids, answer, strict=True):
                codes[message_id].add(code)
        return [_cancel_status(codes[message_id]) for message_id in message_ids]

    def close(self) -> None:
        """Let go of connections; idempotent. Pulls that wait return."""
        self._wakeups.close()
        self._publishing.close()

    def _take(
        self, topic: str, group: str, *, room: int, invisible_ms: int, begins: bool
    ) -> tuple[list[Delivery], int]:
        """Deliveries, and how many ms later the next one may be ready. Begins at a slot by chance, so that a full slot
        starves no other; slots that had more than their share are asked again while there is room, and bytes are left.
        """
        slots = self._runner.slots_of(topic)
        asks_others = slots > 1 and room > 1 and not begins
        moves_of = partial(self._moves, topic, group, invisible_ms=invisible_ms, begins=begins)
        if asks_others and (suspected := self._suspected.pop((topic, group), None)) is not None:
            alone = self._take_alone(topic, group, suspected, moves_of, room=room)
            if alone.deliveries:
                return alone.deliveries, alone.next_ms
        first_slot = random.randrange(slots)
        hungry = [(first_slot + offset) % slots for offset in range(slots)]
        deliveries: list[Delivery] = []
        next_ms, bytes_left = IDLE_MS, PULL_BYTES_MAX
        while hungry and len(deliveries) < room and bytes_left > 0:
            room_left = room - len(deliveries)
            asked_slots, hungry = hungry[:room_left], hungry[room_left:]
            share = room_left // len(asked_slots)
            shared_moves_of = partial(
                moves_of, limit=share, bytes_max=bytes_left // len(asked_slots), asks_others=asks_others
            )
            for slot, taken in self._take_of(
                topic, group, asked_slots, shared_moves_of, must_answer=not deliveries
            ).items():
                deliveries += taken.deliveries
                bytes_left -= sum(len(delivery.body) for delivery in taken.deliveries)
                next_ms = min(next_ms, taken.next_ms)
                if taken.are_suspected_left:
                    self._suspected[topic, group] = slot
                if len(taken.deliveries) == share:
                    hungry.append(slot)
        if not deliveries and (suspected := self._suspected.pop((topic, group), None)) is not None:
            alone = self._take_alone(topic, group, suspected, moves_of, room=room)
            return alone.deliveries, alone.next_ms
        return deliveries, next_ms

    def _take_alone(
        self, topic: str, group: str, slot: int, moves_of: Callable[..., list[ScriptCall]], *, room: int
    ) -> _Taken:
        """Take from one slot, whose messages may have ended a consumer: nothing else is delivered with them."""
        moves = partial(moves_of, limit=room, bytes_max=PULL_BYTES_MAX, asks_others=False)
        return self._take_of(topic, group, [slot], moves, must_answer=True).get(slot, _Taken([], IDLE_MS))

    def _take_of(
        self,
        topic: str,
        group: str,
        slots: Sequence[int],
        moves_of: Callable[[int], list[ScriptCall]],
        *,
        must_answer: bool,
    ) -> dict[int, _Taken]:
        """Pull from slots by these moves, in one round trip a node, and two more if the group is new. Raises the error
        of a slot if none delivered and they must answer.
        """
        calls = {slot: moves_of(slot) for slot in slots}
        self._runner.try_to_run([call for moves in calls.values() for call in moves], repeated_ms=REPEATED_MS)
        if any(is_no_group(moves[-1].outcome) for moves in calls.values()):
            every = range(self._runner.slots_of(topic))
            arguments = group_arguments(group, GroupConfig(), is_change=False)
            self._admin.declare_on(topic, group, every, arguments)
            again = [slot for slot, moves in calls.items() if is_no_group(moves[-1].outcome)]
            calls |= {slot: moves_of(slot) for slot in again}
            self._runner.try_to_run([call for slot in again for call in calls[slot]], repeated_ms=REPEATED_MS)
        failed = [call for moves in calls.values() for call in moves if isinstance(call.outcome, Exception)]
        taken_by_slot = {
            slot: _deliveries(topic, group, [call.outcome for call in moves])
            for slot, moves in calls.items()
            if not isinstance(moves[-1].outcome, Exception)
        }
        if failed and must_answer and not any(taken.deliveries for taken in taken_by_slot.values()):
            raise self._runner.raised(failed[0]) from failed[0].outcome
        return taken_by_slot

    def _moves(
        self, topic: str, group: str, slot: int, *, limit: int, invisible_ms: int, bytes_max: int, begins: bool,
        asks_others: bool,
    ) -> list[ScriptCall]:  # fmt: skip
        scripts = self._runner.scripts
        return [
            self._runner.dispatch_due(topic, slot),
            scripts.of_group(EXPIRE, topic, slot, group, [MOVES_MAX, EXPIRED]),
            scripts.of_group(TAKE, topic, slot, group, [limit, invisible_ms, bytes_max, int(begins), int(asks_others)]),
        ]

    def _settle(
        self, script: Script, texts: Sequence[str], head: Sequence[Argument] = (), *, otherwise: int
    ) -> list[int]:
        """The script's answer for each receipt; `otherwise` for what no receipt of a topic here is."""
        codes = [otherwise] * len(texts)
        by_group_slot: defaultdict[tuple[str, str, int], list[tuple[int, TimerReceipt]]] = defaultdict(list)
        for index, text in enumerate(texts):
            receipt = TimerReceipt.read(text)
            slots = None if receipt is None else self._runner.known_slots_of(receipt.topic)
            if receipt is not None and slots is not None:
                by_group_slot[receipt.topic, receipt.group, slot_of(receipt.id, slots)].append((index, receipt))
        calls: list[ScriptCall] = []
        indexes: list[list[int]] = []
        for (topic, group, slot), named in by_group_slot.items():
            for begin in range(0, len(named), MOVES_MAX):
                part = named[begin : begin + MOVES_MAX]
                arguments = [*head, *(argument for _, receipt in part for argument in (receipt.epoch, receipt.id))]
                calls.append(self._runner.scripts.of_group(script, topic, slot, group, arguments))
                indexes.append([index for index, _ in part])
        for part_indexes, answer in zip(indexes, self._runner.run(calls), strict=True):
            for index, code in zip(part_indexes, answer, strict=True):
                codes[index] = code
        return codes


def _by_slot(message_ids: Sequence[str], slots: int) -> dict[int, list[str]]:
    ids_by_slot: defaultdict[int, list[str]] = defaultdict(list)
    for message_id in dict.fromkeys(message_ids):
        ids_by_slot[slot_of(message_id, slots)].append(message_id)
    return ids_by_slot


def _check_pull(*, max_messages: int, wait_ms: int, invisible_ms: int) -> None:
    if max_messages < 1 or wait_ms < 0 or not limits.INVISIBLE_MS_MIN <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise InvalidMessage(
            f"max_messages is at least 1, wait_ms at least 0, invisible_ms from {limits.INVISIBLE_MS_MIN} "
            f"to {limits.INVISIBLE_MS_MAX}"
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a pull got of one slot; the next message may be ready in `next_ms`."""

    deliveries: list[Delivery]
    next_ms: int
    are_suspected_left: bool = False
    """Whether messages wait that a pull of several slots must not have."""


def _deliveries(topic: str, group: str, outcomes: Sequence[Any]) -> _Taken:
    """Returns the answer of fire, expire and take of one slot."""
    *waits, (retry_ms, epoch, suspected_left, *fields) = outcomes
    next_ms = [ms for ms in (*waits, retry_ms) if isinstance(ms, int) and ms >= 0]
    deliveries = [
        _delivery(
            TimerReceipt(topic, group, str(epoch), fields[at].decode()),
            attempt=fields[at + 1],
            packed=fields[at + 2],
            expired=fields[at + 3] == 1,
        )
        for at in range(0, len(fields), 4)
    ]
    return _Taken(deliveries, min(next_ms, default=IDLE_MS), suspected_left == 1)


def _delivery(receipt: TimerReceipt, *, attempt: int, packed: bytes, expired: bool) -> Delivery:
    return Delivery(receipt=str(receipt), attempt=attempt, message=decode_record(packed), expired=expired)


def _cancel_status(codes: set[int]) -> CancelStatus:
    """Returns one result of the answers of all topics."""
    if 1 in codes:
        return CancelStatus.CANCELED
    return CancelStatus.TOO_LATE if 2 in codes else CancelStatus.UNKNOWN


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
