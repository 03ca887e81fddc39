"""The engine against a model of a page, over histories that Hypothesis invents: any call, time passing, restarts, kills
and power cuts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_core.common.clock import ManualClock
from outbox_core.common.errors import InvalidMessage, StorageFailed
from outbox_core.common.rate_limit import RateLimit
from outbox_core.messages.ids import edited_id
from outbox_core.messages.message import DeadEdit, GroupConfig, Message
from outbox_core.messages.recurring_message import RecurringMessage, occurrence_id
from tests.outbox_broker.action_log import action_segments
from tests.outbox_broker.polling import until
from tests.outbox_broker.powered_storage import PoweredStorage

TOPIC, GROUP = "orders", "billing"
ATTEMPTS_MAX = 3
BACKOFF_MS = 100
REDRIVE_PER_SECOND = EngineOptions().redrive_per_second
SEEDS = st.integers(0, 1 << 16)
BACK = st.integers(0, 5)
IDS = st.sampled_from([f"m{number}" for number in range(12)])
OPTIONS = EngineOptions(
    segment_bytes=4096, schedule_memory_messages_max=2, reserve_bytes=4096, retention_ms=1, retention_check_ms=10**15
)
KEYS = {"m0": "a", "m1": "b", "m2": "a", "m4": "a", "m5": "b", "m6": "a", "m8": "b", "m9": "a"}
"""The others have none."""
RECURRING_TOPIC, RECURRING = "reports", "each-minute"
MINUTE_MS = 60_000
type_of_held = tuple[int, int, int]
"""(sequence, delivery, life): what a receipt stands for."""


@dataclass
class Entry:
    """A message that was handed out and is not settled."""

    visible_ms: int
    deliveries: int = 0
    used: int = 0
    in_flight: bool = False
    life: int = 0
    redriven: bool = False
    used_before: int = 0
    """Of a redriven one: the attempts with which it was dead."""
    together: int = 1
    counts: bool = True
    suspects: int = 0
    """How many were handed out together when its invisible time last ran out, 1 where that was an attempt of it alone;
    0: it did not, or it was tried since."""

    @property
    def used_by_now(self) -> int:
        """Attempts, where the invisible time has run out."""
        return self.used + (self.in_flight and self.counts)

    @property
    def suspects_by_now(self) -> int:
        """The same, where the invisible time has run out."""
        if not self.in_flight:
            return self.suspects
        return 1 if self.counts else self.together

    @property
    def is_suspected(self) -> bool:
        """Whether one of several that were handed out together may have ended their consumer."""
        return self.suspects_by_now > 1


@dataclass
class Recurring:
    """What occurs each minute."""

    generation: int
    fired_to_ms: int
    catch_up: int
    paused: bool = False


@dataclass
class Model:
    """One topic, one group: what they should be."""

    stored: list[str] = field(default_factory=list)
    scheduled: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    canceled: set[str] = field(default_factory=set)
    unsettled: dict[int, Entry] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)
    position: int = 0
    life: int = 0
    sought_in: int = 0
    paused: bool = False
    ordered: bool = False
    passed: list[int] = field(default_factory=list)
    fresh_first: bool = False
    pace: RateLimit = field(default_factory=RateLimit)
    start: int = 0
    """The first that retention has not dropped from the topic."""
    recurring: Recurring | None = None
    generations: int = 0
    occurred: list[str] = field(default_factory=list)
    """Each occurrence that is to have come, once."""
    edited: dict[int, str] = field(default_factory=dict)
    """What an operator made of a message, by its sequence, until it is settled: the id, which is the body, too."""

    def name(self, sequence: int) -> str:
        return self.edited.get(sequence, self.stored[sequence])

    def publish(self, message_id: str, due_ms: int, now_ms: int) -> str:
        if message_id in self.known:
            return "duplicate"
        self.known.add(message_id)
        if message_id in self.canceled:
            return "stored"
        if due_ms > now_ms:
            self.scheduled[message_id] = due_ms
        else:
            self.stored.append(message_id)
        return "stored"

    def fire(self, now_ms: int) -> None:
        for message_id, due_ms in sorted(self.scheduled.items(), key=lambda one: one[1]):
            if due_ms <= now_ms:
                self.stored.append(message_id)
                del self.scheduled[message_id]

    def cancel(self, message_id: str) -> str:
        if message_id in self.known and message_id not in self.canceled and message_id not in self.scheduled:
            return "too_late"
        self.canceled.add(message_id)
        self.scheduled.pop(message_id, None)
        return "canceled" if message_id in self.known else "unknown"

    def bury_expired(self, now_ms: int, *, count_max: int = 1_000, isolates: bool = False) -> list[int]:
        """Bury what has no attempts left, up to the last of `count_max` that are visible again; returns these.

        `isolates`: up to the first that is suspected, or of those that are, half as many as were handed out together.
        """
        again: list[int] = []
        are_suspected: bool | None = None
        for sequence, entry in sorted(self.unsettled.items(), key=lambda one: (one[1].visible_ms, one[0])):
            if len(again) == count_max or entry.visible_ms > now_ms:
                break
            if entry.used_by_now >= ATTEMPTS_MAX:
                self.dead[sequence] = entry.used_by_now
                del self.unsettled[sequence]
                continue
            are_suspected = entry.is_suspected if are_suspected is None else are_suspected
            if isolates and (entry.is_suspected != are_suspected or (are_suspected and len(again) >= count_max)):
                break
            if isolates and are_suspected:
                count_max = min(count_max, entry.suspects_by_now // 2)
                if len(again) >= count_max:
                    break
            again.append(sequence)
        return again

    def pull(self, count: int, now_ms: int, invisible_ms: int, *, begins: bool) -> list[tuple[str, int, type_of_held]]:
        if self.paused:
            return []
        found = self.chosen(count, now_ms, begins=begins)
        if not found and self.ordered:  # fresh messages whose keys are busy have had their turn
            found = self.chosen(count, now_ms, begins=begins)
        self.position = max([self.position, *(sequence + 1 for sequence in found)])
        out = []
        for sequence in found:
            entry = self.unsettled.setdefault(sequence, Entry(0, life=self.life))
            entry.used, entry.suspects = entry.used_by_now, entry.suspects_by_now
            entry.deliveries, entry.in_flight, entry.visible_ms = entry.deliveries + 1, True, now_ms + invisible_ms
            entry.together, entry.counts = len(found), len(found) == 1 and not begins
            out.append((self.name(sequence), entry.used + 1, (sequence, entry.deliveries, entry.life)))
        return out

    def chosen(self, count: int, now_ms: int, *, begins: bool) -> list[int]:
        """Retries and fresh messages, of each its share; or those that are suspected, in turn with fresh ones."""
        again = self.bury_expired(now_ms, count_max=count, isolates=not begins)
        fresh_first = self.fresh_first
        self.fresh_first = not fresh_first if again else fresh_first
        if again and not begins and self.unsettled[again[0]].is_suspected:
            if not (fresh_first and self.has_fresh()):
                return again
            again = []
        share = count // 2 if count > 1 else int(not fresh_first)
        fresh_max = count - min(share, len(again))
        if self.ordered:
            fresh = self.next_of_keys(fresh_max)
        else:
            fresh = list(range(self.position, len(self.stored)))[:fresh_max]
        return again[: count - len(fresh)] + fresh

    def has_fresh(self) -> bool:
        busy = {self.key(sequence) for sequence, entry in self.unsettled.items() if not entry.redriven}
        ready = [sequence for sequence in self.passed if self.key(sequence) not in busy]
        return self.position < len(self.stored) or bool(ready)

    def next_of_keys(self, count: int) -> list[int]:
        """The first message of each key of which none is in hand or waits for its retry; the others are passed."""
        busy = {self.key(sequence) for sequence, entry in self.unsettled.items() if not entry.redriven}
        found: list[int] = []
        passed, self.passed = self.passed, []
        for sequence in [*passed, *range(self.position, len(self.stored))]:
            if len(found) == count and sequence >= self.position:
                break
            key = self.key(sequence)
            may_go = len(found) < count and (key is None or key not in busy)
            (found if may_go else self.passed).append(sequence)
            busy.add(key)
            self.position = max(self.position, sequence + 1)
        return found

    def key(self, sequence: int) -> str | None:
        return KEYS.get(self.stored[sequence])

    def newest(self, held: type_of_held) -> Entry | None:
        entry = self.unsettled.get(held[0])
        return entry if entry and (entry.deliveries, entry.life) == held[1:] else None

    def ack(self, held: type_of_held) -> str:
        if self.newest(held):
            del self.unsettled[held[0]]
            self.edited.pop(held[0], None)
            return "acked"
        if held[0] in self.unsettled or held[0] in self.dead or held[2] < self.sought_in:
            return "stale"
        return "already_acked"

    def nack(self, held: type_of_held, now_ms: int, delay_ms: int | None, counts: bool) -> str:
        entry = self.newest(held)
        if entry is None or not entry.in_flight:
            return "stale"
        used = entry.used + counts
        if counts and used >= ATTEMPTS_MAX:
            del self.unsettled[held[0]]
            self.dead[held[0]] = used
            return "dead"
        if delay_ms is None:
            delay_ms = BACKOFF_MS * 2 ** (used - 1) if counts else 0
        entry.used, entry.in_flight, entry.visible_ms = used, False, now_ms + delay_ms
        entry.suspects = 0 if counts else entry.suspects
        return "requeued"

    def redrive(self, now_ms: int, per_second: int) -> int:
        self.bury_expired(now_ms)
        dead, self.dead = self.dead, {}
        self.life += bool(dead)
        for sequence, used in sorted(dead.items()):
            ready_ms, _ = self.pace.next_ms(now_ms, per_second=per_second, count_max=1)
            self.unsettled[sequence] = Entry(ready_ms, life=self.life, redriven=True, used_before=used)
        return len(dead)

    def stop_redrive(self, now_ms: int) -> int:
        waiting = {
            sequence: entry.used_before
            for sequence, entry in self.unsettled.items()
            if entry.redriven and not entry.deliveries and entry.visible_ms > now_ms
        }
        for sequence in waiting:
            del self.unsettled[sequence]
        self.dead.update(waiting)
        if waiting:
            self.pace.withdraw(now_ms)
        return len(waiting)

    def discard(self, message_ids: list[str], now_ms: int) -> int:
        self.bury_expired(now_ms)
        discarded = [sequence for sequence in self.dead if self.name(sequence) in message_ids]
        for sequence in discarded:
            del self.dead[sequence]
            self.edited.pop(sequence, None)
        return len(discarded)

    def edit(self, new_ids: dict[str, str], now_ms: int) -> int:
        self.bury_expired(now_ms)
        edited = {sequence: new_ids[self.name(sequence)] for sequence in self.dead if self.name(sequence) in new_ids}
        self.life += bool(edited)
        for sequence, new_id in edited.items():
            used = self.dead.pop(sequence)
            self.unsettled[sequence] = Entry(now_ms, life=self.life, redriven=True, used_before=used)
            self.edited[sequence] = new_id
        return len(edited)

    def seek(self, position: int) -> None:
        """From there on, also what is not settled of what is not in the topic any more."""
        self.life += 1
        self.position, self.sought_in = max(position, self.start), self.life
        kept = [sequence for sequence in (*self.unsettled, *self.passed) if position <= sequence < self.position]
        # Redriven, since the order of keys does not apply to them either.
        self.unsettled = {sequence: Entry(0, life=self.life, redriven=True) for sequence in kept}
        self.dead = {sequence: used for sequence, used in self.dead.items() if sequence < self.position}
        self.edited = {one: new_id for one, new_id in self.edited.items() if one in self.dead or one in kept}
        self.passed = []

    def occur(self, now_ms: int) -> list[str]:
        """What has come of the recurring message by now: of those that were missed the newest."""
        recurring = self.recurring
        if recurring is None or recurring.paused:
            return []
        due_ms = range((recurring.fired_to_ms // MINUTE_MS + 1) * MINUTE_MS, now_ms + 1, MINUTE_MS)
        newest_ms = due_ms[-recurring.catch_up :]
        recurring.fired_to_ms = max([recurring.fired_to_ms, *newest_ms])
        new = [occurrence_id(RECURRING, generation=recurring.generation, at_ms=at_ms) for at_ms in newest_ms]
        self.occurred += new
        return new

    def is_gone(self, message_id: str) -> bool:
        """Whether it was dropped from its topic: a restart forgets that there was one of this id."""
        return message_id in self.stored[: self.start]

    def forget_hand_outs(self, synced: Model) -> None:
        """Go back to what the action log was synced with: since then came hand-outs, which nobody answers for."""
        self.unsettled, self.dead = deepcopy(synced.unsettled), dict(synced.dead)
        self.position, self.passed = synced.position, list(synced.passed)


class EngineMachine(RuleBasedStateMachine):
    """Does to the engine and to the model the same, and compares the answers."""

    @initialize(ordered=st.booleans())
    def begin(self, ordered: bool) -> None:
        self.end = ExitStack()
        self.place = Path(self.end.enter_context(tempfile.TemporaryDirectory()))
        self.clock = ManualClock()
        self.model, self.synced = Model(ordered=ordered), Model(ordered=ordered)
        self.lives = self.edits = self.fillers = 0
        self.open()
        config = GroupConfig(max_attempts=ATTEMPTS_MAX, backoff_initial_ms=BACKOFF_MS, ordered=ordered)
        self.engine.admin.declare_group(TOPIC, GROUP, config)
        self.receipts: list[tuple[str, type_of_held]] = []
        self.receipts_synced, self.synced_in = 0, self.newest_of_actions()
        self.publish([("m0", 0), ("m1", 0), ("m2", 0), ("m3", 50), ("m4", 50)])

    @rule(batch=st.lists(st.tuples(IDS, st.sampled_from([0, 0, 50, 51, 400])), min_size=1, max_size=4))
    def publish(self, batch: list[tuple[str, int]]) -> None:
        now_ms = self.clock.now_ms()
        batch = [(one, ms) for one, ms in batch if not self.model.is_gone(one)]
        results = self.engine.publisher.publish(
            [Message(id=one, topic=TOPIC, body=one.encode(), key=KEYS.get(one),
                     deliver_at_ms=now_ms + ms if ms else None) for one, ms in batch]
        )  # fmt: skip
        assert [one.status for one in results] == [self.model.publish(one, now_ms + ms, now_ms) for one, ms in batch]

    @rule(count=st.integers(1, 4), invisible_ms=st.sampled_from([50, 100]), begins=st.booleans())
    def pull(self, count: int, invisible_ms: int, begins: bool) -> None:
        found = self.engine.puller.pull(TOPIC, GROUP, max_messages=count, invisible_ms=invisible_ms, begins=begins)
        suspected = {self.model.name(sequence) for sequence, one in self.model.unsettled.items() if one.suspects_by_now}
        expected = self.model.pull(count, self.clock.now_ms(), invisible_ms, begins=begins)
        assert [(one.id, one.attempt, one.body, one.expired) for one in found] == [
            (message_id, attempt, message_id.encode(), message_id in suspected) for message_id, attempt, _ in expected
        ]
        self.receipts += [(one.receipt, held) for one, (_, _, held) in zip(found, expected, strict=True)]

    @rule(back=BACK)
    def ack(self, back: int) -> None:
        if not self.receipts:  # no precondition: how many there are hangs on what other threads had synced
            return
        held = self.receipt(back)
        statuses = self.engine.settler.ack([held[0]])
        assert statuses == [self.model.ack(held[1])]
        self.answered(statuses == ["acked"])

    @rule(back=BACK, delay_ms=st.sampled_from([0, 0, 50, None]), counts=st.booleans())
    def nack(self, back: int, delay_ms: int | None, counts: bool) -> None:
        if not self.receipts:
            return
        held = self.receipt(back)
        statuses = self.engine.settler.nack([held[0]], delay_ms=delay_ms, counts=counts)
        assert statuses == [self.model.nack(held[1], self.clock.now_ms(), delay_ms, counts)]
        self.answered(statuses != ["stale"])

    @rule(back=BACK, invisible_ms=st.sampled_from([50, 100]), begun=st.booleans())
    def extend(self, back: int, invisible_ms: int, begun: bool) -> None:
        if not self.receipts:
            return
        held = self.receipt(back)
        entry = self.model.newest(held[1])
        holds = entry is not None and entry.in_flight
        assert self.engine.settler.extend([held[0]], invisible_ms=invisible_ms, begun=begun) == [
            "extended" if holds else "stale"
        ]
        if entry is not None and holds:
            entry.visible_ms = self.clock.now_ms() + invisible_ms
            entry.counts = entry.counts or begun

    @rule(ids=st.lists(IDS, min_size=1, max_size=3))
    def cancel(self, ids: list[str]) -> None:
        ids = [one for one in ids if not self.model.is_gone(one)]
        known = [self.model.cancel(one) for one in ids]
        assert self.engine.publisher.cancel(ids) == known

    @rule(ms=st.sampled_from([1, 49, 50, 50, 100, 100, 1_000]))
    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)
        self.engine.publisher.cancel([])  # fires what is due, as the timer does at about the same time
        self.model.fire(self.clock.now_ms())
        self.see_what_occurred()

    @rule(minutes=st.integers(1, 5), is_down=st.booleans())
    def pass_minutes(self, minutes: int, is_down: bool) -> None:
        if not is_down:
            self.pass_time(minutes * MINUTE_MS)
            return
        self.close()
        self.clock.advance(minutes * MINUTE_MS)
        self.open()
        self.pass_time(1)

    @rule(catch_up=st.integers(1, 3))
    def add_recurring(self, catch_up: int) -> None:
        if self.model.recurring is not None:
            return
        self.engine.recurring.add(
            RECURRING, RecurringMessage(topic=RECURRING_TOPIC, cron="* * * * *", catch_up=catch_up)
        )
        self.model.generations += 1
        self.model.recurring = Recurring(self.model.generations, self.clock.now_ms(), catch_up)
        self.answered(True)

    @rule(paused=st.booleans())
    def pause_recurring(self, paused: bool) -> None:
        if self.model.recurring is None:
            with pytest.raises(KeyError):
                self.engine.recurring.pause(RECURRING, paused=paused)
            return
        self.engine.recurring.pause(RECURRING, paused=paused)
        self.model.recurring.paused = paused
        self.answered(True)
        self.see_what_occurred()

    @rule()
    def delete_recurring(self) -> None:
        if self.model.recurring is None:
            return
        self.engine.recurring.delete(RECURRING)
        self.model.recurring = None
        self.answered(True)

    @rule(per_second=st.sampled_from([None, 1, 2]))
    def redrive(self, per_second: int | None) -> None:
        count = self.engine.dead_letters.redrive(TOPIC, GROUP, per_second=per_second)
        assert count == self.model.redrive(self.clock.now_ms(), per_second or REDRIVE_PER_SECOND)
        self.answered(count > 0)

    @rule()
    def stop_redrive(self) -> None:
        count = self.engine.dead_letters.stop_redrive(TOPIC, GROUP, by="ops")
        assert count == self.model.stop_redrive(self.clock.now_ms())
        self.answered(count > 0)

    @rule(ids=st.lists(IDS, min_size=1, max_size=6))
    def discard(self, ids: list[str]) -> None:
        count = self.engine.dead_letters.discard(TOPIC, GROUP, ids=ids, by="ops", why="wrong")
        assert count == self.model.discard(ids, self.clock.now_ms())
        self.answered(count > 0)

    @rule(ids=st.lists(IDS, min_size=1, max_size=4), back=BACK)
    def edit(self, ids: list[str], back: int) -> None:
        """Of what was published, and of what an edit made of it before; then once more, which changes nothing."""
        self.edits += 1
        operation = EditOperation(name=f"op-{self.edits}", by="ops", why="typo")
        ids = [*dict.fromkeys(ids), *list(self.model.edited.values())[-back:]]
        new_ids = {one: edited_id(operation.name, TOPIC, GROUP, one) for one in ids}
        edits = {one: DeadEdit(body=new_id.encode()) for one, new_id in new_ids.items()}
        results = self.engine.dead_letters.edit(TOPIC, GROUP, edits, operation=operation)
        count = self.model.edit(new_ids, self.clock.now_ms())
        assert [one.new_id for one in results if one.new_id] == [
            new_ids[one] for one in ids if new_ids[one] in self.model.edited.values()
        ]
        self.answered(count > 0)
        assert self.engine.dead_letters.edit(TOPIC, GROUP, edits, operation=operation) == results

    @rule(position=st.integers(0, 12))
    def seek(self, position: int) -> None:
        if position > len(self.model.stored):
            with pytest.raises(InvalidMessage, match="beyond the end"):
                self.engine.admin.seek(TOPIC, GROUP, to_offset=position)
            return
        self.engine.admin.seek(TOPIC, GROUP, to_offset=position)
        self.model.seek(position)
        self.answered(True)

    @rule(pulls=st.integers(0, 4))
    def drop_what_is_old(self, pulls: int) -> None:
        """What the group may still get is moved out of the way, and what it has not got yet stays."""
        for _ in range(pulls):
            self.pull(4, 100, begins=True)
        self.engine.context.messages.roll()
        self.fillers += 1
        self.publish([(f"filler-{self.fillers}", 0)])
        self.pass_time(1)
        self.engine.retention.drop_outdated()
        start = self.engine.context.state.topic(TOPIC).index.start
        assert self.model.start <= start <= max(self.model.position, self.model.start)
        self.model.start = start

    @rule(paused=st.booleans(), restarted=st.booleans())
    def pause(self, paused: bool, restarted: bool) -> None:
        self.engine.admin.pause(TOPIC, GROUP, paused=paused)
        self.model.paused = paused
        self.answered(True)
        if restarted:
            self.restart()
        if paused:
            self.pull(3, 50, begins=True)
            self.engine.admin.pause(TOPIC, GROUP, paused=False)
            self.model.paused = False

    @rule()
    def restart(self) -> None:
        self.close()
        self.open()

    @rule()
    def kill(self) -> None:
        """Everything that was written is there, also what nobody was answered for."""
        self.live_on(self.storage.copy_after_kill)

    @rule(seed=SEEDS)
    def cut_the_power(self, seed: int) -> None:
        """Everything that was answered is there. Hand-outs since the action log was synced are forgotten.

        Where it began a new segment since then, it was synced in between, and some are not.
        """
        if self.newest_of_actions() != self.synced_in:
            self.kill()
            return
        self.live_on(partial(self.storage.copy_after_power_cut, random=Random(seed), whole_in="messages"))
        self.model.forget_hand_outs(self.synced)
        forgotten, self.receipts = self.receipts[self.receipts_synced :], self.receipts[: self.receipts_synced]
        assert "acked" not in self.engine.settler.ack([one for one, _ in forgotten])

    @rule(ids=st.lists(IDS, min_size=1, max_size=4, unique=True), is_kill=st.booleans(), seed=SEEDS)
    def fail_a_publish(self, ids: list[str], is_kill: bool, seed: int) -> None:
        """What was not answered may be there or not: some of the batch, from its first on."""
        new = [one for one in ids if one not in self.model.known | self.model.canceled]  # nor gone, since known
        if not new:
            return
        self.storage.fails = True
        with pytest.raises(StorageFailed):
            self.engine.publisher.publish(
                [Message(id=one, topic=TOPIC, body=one.encode(), key=KEYS.get(one)) for one in new]
            )
        if is_kill:
            self.kill()
        else:
            self.cut_the_power(seed)

        there = self.engine.reader.read(TOPIC, offset=len(self.model.stored)).messages
        assert [one.id for one in there] == new[: len(there)]
        assert len(there) == len(new) or not is_kill
        for one in new[: len(there)]:
            self.model.publish(one, 0, 0)

    @rule(offset=st.integers(0, 12), count=st.integers(1, 4))
    def read(self, offset: int, count: int) -> None:
        found = self.engine.reader.read(TOPIC, offset=offset, max_messages=count)
        offset = max(offset, self.model.start)
        end = min(max(offset, len(self.model.stored)), offset + count)
        assert [one.id for one in found.messages] == self.model.stored[offset:end]
        assert found.next_offset == min(end, len(self.model.stored))

    @rule(limit=st.integers(1, 3))
    def look_at_the_dead(self, limit: int) -> None:
        self.model.bury_expired(self.clock.now_ms())
        letters, after = self.engine.admin.dead(TOPIC, GROUP, limit=limit)
        while after is not None:
            page, after = self.engine.admin.dead(TOPIC, GROUP, limit=limit, after=after)
            assert 0 < len(page) <= limit
            letters += page
        assert [(one.id, one.attempts) for one in letters] == [
            (self.model.name(sequence), used) for sequence, used in sorted(self.model.dead.items())
        ]

    def open(self) -> None:
        self.storage = PoweredStorage()
        self.folder = self.place / f"life-{self.lives}"
        self.engine = Engine.open(self.folder, clock=self.clock, options=OPTIONS, storage=self.storage)
        self.model.fresh_first = False  # not written down

    def close(self) -> None:
        """Which syncs; what opens next may already have written again before the next invariant is looked at."""
        self.engine.close()
        self.answered(True)

    def see_what_occurred(self) -> None:
        """Wait for what is to occur, and until it is noted; nothing else has come, and nothing twice."""
        new = self.model.occur(self.clock.now_ms())
        if new:
            until(lambda: self.occurrences() >= len(self.model.occurred))
            self.engine.recurring.pause(RECURRING, paused=False)  # changes nothing, and waits until all is noted
            self.answered(True)
            found = self.engine.reader.read(RECURRING_TOPIC, offset=self.occurrences() - len(new))
            assert [message.id for message in found.messages] == new
        assert self.occurrences() == len(self.model.occurred)

    def occurrences(self) -> int:
        if RECURRING_TOPIC not in self.engine.admin.topics():
            return 0
        return self.engine.admin.topic_figures(RECURRING_TOPIC)["stored"]

    def answered(self, holds: bool) -> None:
        """Keep what the model is: from now on it holds, also through a power cut."""
        if holds:
            self.synced, self.receipts_synced = deepcopy(self.model), len(self.receipts)
            self.synced_in = self.newest_of_actions()

    def newest_of_actions(self) -> str:
        return action_segments(self.folder)[-1].name

    def live_on(self, copy: Callable[[Path, Path], None]) -> None:
        """On a copy of the folder, whatever the process that has it does meanwhile."""
        self.lives += 1
        copy(self.folder, self.place / f"life-{self.lives}")
        with suppress(StorageFailed):
            self.engine.close()
        shutil.rmtree(self.folder)
        self.open()

    def receipt(self, back: int) -> tuple[str, type_of_held]:
        """One of the newest receipts, rather than any: most of the old ones are stale."""
        return self.receipts[-1 - back % len(self.receipts)]

    @invariant()
    def note_synced(self) -> None:
        """Keep what the model is whenever the action log is on the disk anyway."""
        if hasattr(self, "engine"):
            self.answered(self.storage.is_synced(self.folder / "actions"))

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        figures = self.engine.admin.group_figures(TOPIC, GROUP)
        model = self.model
        in_flight = sum(entry.in_flight for entry in model.unsettled.values())
        expected = {
            "stored": len(model.stored),
            "scheduled": len(model.scheduled),
            "dead": len(model.dead),
            "in_flight": in_flight,
            "backlog": len(model.stored) - model.position + len(model.passed) + len(model.unsettled) - in_flight,
            "position": model.position,
        }
        assert {name: figures[name] for name in expected} == expected

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
            self.end.close()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTheEngineDoesWhatItsModelDoes = pytest.mark.slow(EngineMachine.TestCase)
