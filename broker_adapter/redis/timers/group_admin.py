"""Administers groups and dead letters of the timer store, and reads its statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from broker_adapter.redis.script_sender import Argument, Script
from broker_adapter.redis.timers.slot_scripts import (
    DECLARE,
    DROP_GROUP,
    EXPIRE,
    FIGURES,
    GROUPS,
    LIST_DEAD,
    MOVES_MAX,
    PAUSE,
    REDRIVE,
    UNLINK,
    slot_of,
)
from broker_adapter.redis.timers.timer_script_runner import TimerScriptRunner
from outbox_core.common.errors import BrokerRefused, InUse, InvalidMessage, NotSupported
from outbox_core.messages.broker_port import topic_figures
from outbox_core.messages.failure_history import EXPIRED, REFUSED, with_count
from outbox_core.messages.limits import BODY_BYTES_MAX
from outbox_core.messages.message import DeadLetter, GroupConfig, check_group, check_topic, decode_record

DEAD_BYTES_MAX: Final = BODY_BYTES_MAX
_GROUP_FIGURES: Final = ("backlog", "in_flight", "dead", "oldest_unacked_age_ms")


class RedisGroupAdmin:
    """The BrokerAdmin port on the timer store. Thread-safe."""

    def __init__(self, runner: TimerScriptRunner) -> None:
        self._runner = runner

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make the group, or change its settings. NotSupported: a filter, and an ordered group."""
        topic, group = check_topic(topic), check_group(group)
        if config.filter is not None or config.ordered:
            raise NotSupported("consumer groups in Redis have no filter, and no order by key")
        self.declare_on(topic, group, range(self._runner.slots_of(topic)), group_arguments(group, config))

    def declare_on(self, topic: str, group: str, slots: Iterable[int], arguments: Sequence[Argument]) -> None:
        """Declare it on these slots of a topic that is registered; see group_arguments()."""
        calls = [self._runner.scripts.of_group(DECLARE, topic, slot, group, arguments) for slot in slots]
        self._runner.run(calls, durable=True)

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return self._runner.topics()

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Counts over all slots. `stored`: how many came due so far; what each group acknowledged is not kept. The age
        is that of the oldest among the first 1,000 in flight and to be tried again, and all behind the position.
        """
        slots = self._known_slots_of(topic)
        of_slots = self._run_on_slots(FIGURES, topic, slots)
        stored, scheduled = (sum(values) for values in zip(*of_slots, strict=True))
        groups = [group] if group is not None else self._groups(topic)
        of_groups = [self._group_figures(topic, name, slots) for name in groups]
        if group is not None:
            return {"stored": stored, "scheduled": scheduled, **of_groups[0]}
        return topic_figures(stored=stored, scheduled=scheduled, groups=of_groups)

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """NotSupported: what all groups acknowledged is gone."""
        raise NotSupported("a consumer group in Redis cannot be moved: what all groups acknowledged is not kept")

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Stop or resume deliveries to the group."""
        slots = range(self._known_slots_of(topic))
        self._runner.run([self._runner.scripts.of_group(PAUSE, topic, slot, group, [int(paused)]) for slot in slots])

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters, slot by slot, in each the oldest first; no further one behind DEAD_BYTES_MAX."""
        slots = self._known_slots_of(topic)
        slot, _, after_id = (after or "0/").partition("/")
        if limit < 1 or not (slot.isascii() and slot.isdigit()):
            raise InvalidMessage("limit is at least 1, and `after` a cursor of the page before")
        letters: list[DeadLetter] = []
        bytes_left = DEAD_BYTES_MAX
        for slot_number in range(int(slot), slots):
            expire = self._runner.scripts.of_group(EXPIRE, topic, slot_number, group, [MOVES_MAX, EXPIRED])
            arguments: list[Argument] = [limit + 1 - len(letters), after_id, max(0, bytes_left)]
            page = self._runner.scripts.of_group(LIST_DEAD, topic, slot_number, group, arguments)
            _, (is_cut, *fields) = self._runner.run([expire, page])
            letters += [_letter(group, fields[at : at + 4]) for at in range(0, len(fields), 4)]
            bytes_left -= sum(len(packed) for packed in fields[3::4])
            after_id = ""
            if is_cut or len(letters) > limit:
                last = letters[:limit][-1].id
                return letters[:limit], f"{slot_of(last, slots)}/{last}"
        return letters, None

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Deliver dead letters again; by default all at once. After BrokerUnavailable some may have been redriven."""
        redriven = 0
        slots = self._known_slots_of(topic)
        for slot in range(slots):
            named = [message_id for message_id in ids or () if slot_of(message_id, slots) == slot]
            room = self._slot_figures(topic, group, slot)[4] if ids is None else len(named)
            for begin in range(0, room, MOVES_MAX):
                part = named[begin : begin + MOVES_MAX]
                arguments: list[Argument] = [min(MOVES_MAX, room - begin), per_second or 0, redriven, *part]
                [moved] = self._runner.run([self._runner.scripts.of_group(REDRIVE, topic, slot, group, arguments)])
                redriven += moved
        return redriven

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete the group: what the others have acknowledged is removed, and what is left stays for groups to come.

        Raises InUse while consumers hold messages, unless forced: a consumer that goes on makes the group again. After
        BrokerUnavailable a part of it may be gone: repeat it.
        """
        slots = self._known_slots_of(topic)
        in_flight = self._group_figures(topic, group, slots)["in_flight"]
        if in_flight and not force:
            raise InUse(f"consumers of {topic}/{group} hold {in_flight:,} messages; stop its consumers, or force")
        for slot in range(slots):
            drop = self._runner.scripts.of_group(DROP_GROUP, topic, slot, group, [group, MOVES_MAX])
            while self._runner.run([drop], durable=True) == [0]:
                pass  # each part leaves fewer

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete the topic with its messages and groups. Its producers and consumers must be stopped: they remember its
        number of slots. Raises InUse while it has groups or scheduled messages, unless forced.
        """
        slots = self._known_slots_of(topic)
        groups, scheduled = self._groups(topic), self.figures(topic)["scheduled"]
        if (groups or scheduled) and not force:
            raise InUse(
                f"{topic} has the consumer groups {', '.join(groups) or 'none'}, and {scheduled:,} scheduled messages; "
                "delete them first, or force"
            )
        scripts = self._runner.scripts
        calls = [scripts.of_group(UNLINK, topic, slot, group) for slot in range(slots) for group in groups]
        self._runner.run([*calls, *(scripts.of_slot(UNLINK, topic, slot) for slot in range(slots))], durable=True)
        self._runner.unregister(topic)

    def _group_figures(self, topic: str, group: str, slots: int) -> dict[str, int]:
        of_slots = [self._slot_figures(topic, group, slot)[2:] for slot in range(slots)]
        *counts, ages = zip(*of_slots, strict=True)
        return dict(zip(_GROUP_FIGURES, (*map(sum, counts), max(ages)), strict=True))

    def _slot_figures(self, topic: str, group: str, slot: int) -> list[int]:
        scripts = self._runner.scripts
        expire = scripts.of_group(EXPIRE, topic, slot, group, [MOVES_MAX, EXPIRED])
        *_, answer = self._runner.run([expire, scripts.of_group(FIGURES, topic, slot, group)])
        figures: list[int] = answer
        return figures

    def _groups(self, topic: str) -> list[str]:
        [names] = self._runner.run([self._runner.scripts.of_slot(GROUPS, topic, 0)])
        return sorted(name.decode() for name in names)

    def _run_on_slots(self, script: Script, topic: str, slots: int) -> list[Any]:
        scripts = self._runner.scripts
        calls = [
            call
            for slot in range(slots)
            for call in (self._runner.dispatch_due(topic, slot), scripts.of_slot(script, topic, slot))
        ]
        return self._runner.run(calls)[1::2]

    def _known_slots_of(self, topic: str) -> int:
        slots = self._runner.known_slots_of(topic)
        if slots is None:
            raise BrokerRefused(f"there is no topic {topic}")
        return slots


def group_arguments(group: str, config: GroupConfig, *, is_change: bool = True) -> list[Argument]:
    """Returns the arguments of declare.lua after its keys."""
    start: Argument = "latest" if config.start == "latest" else 0
    if config.start_at_ms is not None:
        start = config.start_at_ms * 1_000 - 1
    settings: dict[str, Argument] = {
        "max_attempts": config.max_attempts,
        "backoff_initial_ms": config.backoff_initial_ms,
        "backoff_multiplier": str(config.backoff_multiplier),
        "backoff_max_ms": config.backoff_max_ms,
    }
    return [group, start, int(is_change), *(part for setting in settings.items() for part in setting)]


def _letter(group: str, fields: Sequence[Any]) -> DeadLetter:
    _, dead_at_ms, packed_state, packed = fields
    _, attempts, entries, *_ = msgspec.msgpack.decode(packed_state)
    history = tuple(zip(entries[::2], entries[1::2], strict=True))
    reason = history[-1][0]
    return DeadLetter(
        message=decode_record(packed),
        group=group,
        attempts=attempts,
        reason=with_count(reason, attempts) if reason in {EXPIRED, REFUSED} else reason,
        dead_at_ms=dead_at_ms,
        history=history,
    )
