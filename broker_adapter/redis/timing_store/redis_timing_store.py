"""Implements the timing store of one source on Redis."""

from __future__ import annotations

import random
import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.connections import Servers, opener
from broker_adapter.redis.durability_inspection import VERSION_MIN, clock_ahead_ms
from broker_adapter.redis.errors import exception_for
from broker_adapter.redis.redis_options import PREFIX_DEFAULT, SENTINEL_OPTIONS, checked_slots, port_of
from broker_adapter.redis.script_sender import Argument, Deadline, ScriptCall, ScriptSender
from broker_adapter.redis.timers.slot_scripts import REGISTER, slot_of
from broker_adapter.redis.timing_store.timing_scripts import (
    ADD,
    LIST,
    REMOVE,
    SETTLE,
    TAKE,
    TimingKeys,
    member_of,
    row_of,
)
from broker_adapter.redis.wake_subscription import WakeSubscription
from outbox_core.common.clock import Clock, SystemClock
from outbox_core.common.errors import DECODE_ERRORS, BrokerError, ConfigurationError, StorageFailed
from outbox_core.messages.ids import new_token
from outbox_core.messages.timing_port import (
    Rebuild,
    SlotFigures,
    SlotServer,
    SlotState,
    SlotStatus,
    StoredTimer,
    TakenTimers,
    TimedRow,
    Timer,
    TimerPage,
    TimingStore,
)
from outbox_core.protocol.decoder_cache import json_decoder
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

TIMERS_A_CALL_MAX: Final = 500
"""In one call of a script, beside which nothing else runs on the server."""
TAKE_MS_MAX: Final = 1_000
"""A shard that is out holds up the slots of the others for so long."""
REBUILD_MS: Final = 20_000
"""A rebuild that does not go on for so long, since its process was killed, is over, and another one may begin."""
ANNOUNCED_MS: Final = 30_000
"""For so long the latest server of a slot is shown: some of its announcements may fail."""
_BUILDING: Final = "building/"
_POLICY: Final = "noeviction"
NAME_DEFAULT: Final = "outbox"
SLOTS_DEFAULT: Final = 4
_OPTIONS: Final = SENTINEL_OPTIONS | {"prefix", "name", "slots"}
_URL_NAME: Final = "the timing store's URL"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)


class RedisTimingStore:
    """A TimingStore. Thread-safe, but for wait(); does no I/O before it is used; a forked child connects anew."""

    def __init__(self, sender: ScriptSender, keys: TimingKeys, *, slots: int, timeout_ms: int, clock: Clock) -> None:
        self._sender = sender
        self._keys = keys
        self._slots = slots
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._registered = False
        self._rebuild = _BUILDING + new_token()
        self._closing = threading.Event()
        self._wakeups = WakeSubscription(sender, keys.channel, closing=self._closing, clock=clock)

    # -- timers ------------------------------------------------------------------------------------------------------

    def add(self, timers: Sequence[Timer], *, only_missing: bool = False) -> int:
        """See TimerSink.add."""
        self._register()
        by_slot: defaultdict[int, list[Argument]] = defaultdict(list)
        for timer in timers:
            by_slot[slot_of(timer.row.id, self._slots)] += [timer.due_at_ms * 1000, member_of(timer.row)]
        head: list[Argument] = [self._keys.channel, "NX" if only_missing else "CH"]
        part = 2 * TIMERS_A_CALL_MAX
        calls = [
            self._keys.call_on_due(ADD, slot, [*head, *pairs[begin : begin + part]])
            for slot, pairs in by_slot.items()
            for begin in range(0, len(pairs), part)
        ]
        return sum(self._run(calls))

    def take(self, slots: Sequence[int], *, limit: int, lease_ms: int, ahead_ms: int = 0) -> list[TakenTimers]:
        """See TimerQueue.take. Begins at a slot by chance, each with a share, so that a full one starves no other."""
        asked_slots = random.sample(list(slots), min(len(slots), limit))
        share = min(TIMERS_A_CALL_MAX, limit // max(1, len(asked_slots)))
        calls = [self._keys.call_on_slot(TAKE, slot, [share, lease_ms, ahead_ms]) for slot in asked_slots]
        self._sender.send(calls, Deadline(self._clock, min(self._timeout_ms, TAKE_MS_MAX)))
        answered = [
            _taken(slot, call.outcome)
            for slot, call in zip(asked_slots, calls, strict=True)
            if not isinstance(call.outcome, Exception)
        ]
        return answered or [
            _taken(slot, answer) for slot, answer in zip(asked_slots, self._answers(calls), strict=True)
        ]

    def settle(self, taken: Sequence[TakenTimers], *, later_ms: Mapping[TimedRow, int]) -> None:
        """See TimerQueue.settle. The calls of one node go together, so that a batch costs a round trip to each."""
        self._run([self._settlement(timers, later_ms) for timers in taken if timers.rows])

    def wait(self, timeout_ms: int) -> None:
        """See TimerQueue.wait."""
        self._wakeups.wait(timeout_ms)

    # -- administration ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """See TimingAdmin.slots."""
        return self._slots

    def prepare(self) -> None:
        """See TimingAdmin.prepare."""
        deadline = Deadline(self._clock, self._timeout_ms)
        asked_at_ms = self._clock.now_ms()
        for address, settings in self._sender.until_answered(_settings, deadline):
            _check_settings(address, settings)
            ahead_ms = clock_ahead_ms(settings, asked_at_ms=asked_at_ms, answered_at_ms=self._clock.now_ms())
            if ahead_ms:
                logger.warning("timing_store_clock_differs", extra={"node": address, "ahead_ms": ahead_ms})
        try:
            self._register()
        except StorageFailed as error:
            raise ConfigurationError(str(error)) from error

    def begin_rebuild(self, slots: Sequence[int]) -> Rebuild:
        """See TimingAdmin.begin_rebuild. A server that lost everything lost the source's registration, too.

        All rebuilds of this object have one name, so a later one has the slots of one that an outage interrupted.
        """
        self._registered = False
        self._register()
        marked = self._mark(slots, expected="", new=self._rebuild, for_ms=REBUILD_MS)
        return Rebuild(self._rebuild, [slot for slot, is_ours in zip(slots, marked, strict=True) if is_ours])

    def continue_rebuild(self, rebuild: Rebuild) -> bool:
        """See TimingAdmin.continue_rebuild."""
        return all(self._mark(rebuild.slots, expected=rebuild.name, new=rebuild.name, for_ms=REBUILD_MS))

    def end_rebuild(self, rebuild: Rebuild) -> bool:
        """See TimingAdmin.end_rebuild."""
        complete = rebuild.name.removeprefix(_BUILDING)
        return all(self._mark(rebuild.slots, expected=rebuild.name, new=complete, for_ms=0))

    def abandon_rebuild(self, rebuild: Rebuild) -> None:
        """See TimingAdmin.abandon_rebuild."""
        self._mark(rebuild.slots, expected=rebuild.name, new="", for_ms=0)

    def _mark(self, slots: Sequence[int], *, expected: str, new: str, for_ms: int) -> list[Any]:
        return self._run([self._keys.call_on_generation(slot, [expected, new, for_ms]) for slot in slots])

    def figures(self) -> list[SlotFigures]:
        """See TimingAdmin.figures."""
        calls = [self._keys.call_for_figures(slot) for slot in range(self._slots)]
        return [_figures(slot, answer) for slot, answer in enumerate(self._run(calls))]

    def announce(self, slots: Sequence[int], server: SlotServer) -> None:
        """See TimingStatus.announce."""
        text = msgspec.json.encode(server)
        self._run([self._keys.call_to_announce(slot, [text, ANNOUNCED_MS]) for slot in slots])

    def statuses(self, slots: Sequence[int]) -> list[SlotStatus]:
        """See TimingStatus.statuses."""
        calls = [self._keys.call_for_figures(slot) for slot in slots]
        self._sender.send(calls, Deadline(self._clock, self._timeout_ms))
        if calls and all(isinstance(call.outcome, Exception) for call in calls):
            self._answers(calls)
        return [self._status(slot, call.outcome) for slot, call in zip(slots, calls, strict=True)]

    def list_timers(self, slot: int, *, cursor: int, limit: int) -> TimerPage:
        """See TimerScan.list_timers."""
        [answer] = self._run([self._keys.call_on_due(LIST, slot, [cursor, min(limit, TIMERS_A_CALL_MAX)])])
        following, *parts = answer
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return TimerPage([StoredTimer(row_of(member), int(at_us)) for member, at_us in pairs], int(following) or None)

    def remove_timers(self, slot: int, timers: Sequence[StoredTimer]) -> int:
        """See TimerScan.remove_timers."""
        pairs: list[Argument] = [part for timer in timers for part in (member_of(timer.row), timer.at_us)]
        part = 2 * TIMERS_A_CALL_MAX
        calls = [
            self._keys.call_on_due(REMOVE, slot, pairs[begin : begin + part]) for begin in range(0, len(pairs), part)
        ]
        return sum(self._run(calls))

    def close(self) -> None:
        """See TimerSink.close. Who waits returns."""
        self._closing.set()
        self._wakeups.close()
        self._sender.close()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Register the source where it is new. Raises StorageFailed where it has another number of slots: what one
        process adds, the other would not take.
        """
        if self._registered:
            return
        [slots] = self._run([self._registration()])
        if slots != self._slots:
            raise StorageFailed(
                f"the timing store {self._keys.source} has {slots} slots, and its URL says slots={self._slots}: "
                "give all processes the same URL, or another name="
            )
        self._registered = True

    def _settlement(self, taken: TakenTimers, later_ms: Mapping[TimedRow, int]) -> ScriptCall:
        pairs = [part for row in taken.rows for part in (member_of(row), later_ms.get(row, -1))]
        return self._keys.call_on_due(SETTLE, taken.slot, [taken.lease, *pairs])

    def _status(self, slot: int, answer: Any) -> SlotStatus:
        if isinstance(answer, Exception):
            error = (
                answer if isinstance(answer, BrokerError) else exception_for(answer, addresses=self._sender.addresses)
            )
            return SlotStatus(slot=slot, problem=str(error))
        *_, server, valid_ms = answer
        seen_server = _server(server)
        return SlotStatus(
            slot=slot,
            figures=_figures(slot, answer),
            server=seen_server,
            seen_ms_ago=None if seen_server is None else max(0, ANNOUNCED_MS - valid_ms),
        )

    def _registration(self) -> ScriptCall:
        arguments: list[Argument] = [self._keys.source, self._slots]
        return ScriptCall(script=REGISTER, keys=[self._keys.sources], arguments=arguments)

    def _run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """The answers, in order. Raises the first error."""
        self._sender.send(calls, Deadline(self._clock, self._timeout_ms))
        return self._answers(calls)

    def _answers(self, calls: Sequence[ScriptCall]) -> list[Any]:
        for call in calls:
            if isinstance(call.outcome, BrokerError):
                raise call.outcome
            if isinstance(call.outcome, Exception):
                raise exception_for(call.outcome, addresses=self._sender.addresses) from call.outcome
        return [call.outcome for call in calls]


def _settings(servers: Servers) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (address, {**node.info("server"), **node.info("memory"), **node.info("persistence")})
        for address, node in servers.masters()
    ]


def _check_settings(address: str, info: Mapping[str, Any]) -> None:
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < VERSION_MIN:
        raise ConfigurationError(f"Redis at {address} is version {version}: the timing store needs 7.0 or later")
    policy = str(info.get("maxmemory_policy", _POLICY))
    if policy != _POLICY:
        raise ConfigurationError(
            f"Redis at {address} has maxmemory-policy {policy}, which removes timers: "
            "CONFIG SET maxmemory-policy noeviction, and in redis.conf"
        )
    if not info.get("aof_enabled"):
        logger.warning("timing_store_without_aof", extra={"node": address, "effect": "a restart causes a rebuild"})


def _taken(slot: int, answer: Sequence[Any]) -> TakenTimers:
    generation, next_ms, late_ms, lease, *members = answer
    return TakenTimers(
        slot=slot,
        rows=[row_of(member) for member in members],
        lease=lease.decode(),
        late_ms=late_ms,
        next_ms=_ms(next_ms),
        complete=_is_complete(generation),
    )


def _figures(slot: int, answer: Sequence[Any]) -> SlotFigures:
    generation, timers, due, next_ms, *_ = answer
    return SlotFigures(slot=slot, timers=timers, due=due, next_ms=_ms(next_ms), state=_state(generation))


def _server(text: bytes) -> SlotServer | None:
    """Returns who announced itself; None also for the text of another version or program."""
    try:
        return json_decoder(SlotServer).decode(text) if text else None
    except DECODE_ERRORS:
        return None


def _state(generation: bytes) -> SlotState:
    if _is_complete(generation):
        return SlotState.COMPLETE
    return SlotState.REBUILDING if generation else SlotState.INCOMPLETE


def _ms(answer: int) -> int | None:
    return None if answer < 0 else answer


def _is_complete(generation: bytes) -> bool:
    return bool(generation) and not generation.startswith(_BUILDING.encode())


def open_timing_store(url: str, *, timeout_ms: int | None = None) -> TimingStore:
    """The timing store for redis://, redis+cluster://, redis+sentinel:// or over TLS rediss://, rediss+cluster://,
    rediss+sentinel://; does no I/O until it is used.

    `?name=`: of the source, one for each message schema that uses this Redis; `?slots=`: a power of two; `?prefix=`: of
    all keys. All processes of a source give the same. Raises ConfigurationError.
    """
    parsed = BrokerUrl.parse(url, port=port_of(url), options=_OPTIONS, url_name=_URL_NAME)
    bound_ms = parsed.timeout_ms if timeout_ms is None else timeout_ms
    name = parsed.options.get("name", NAME_DEFAULT)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"name in {_URL_NAME} is 1 to 255 of A-Z a-z 0-9 . _ -, not {name!r}")
    sender = ScriptSender(opener(parsed, timeout_ms=bound_ms, ca_file=None), addresses=parsed.addresses)
    return RedisTimingStore(
        sender,
        TimingKeys(parsed.options.get("prefix", PREFIX_DEFAULT), name),
        slots=checked_slots(parsed.number("slots", default=SLOTS_DEFAULT), url_name=_URL_NAME),
        timeout_ms=bound_ms,
        clock=SystemClock(),
    )
