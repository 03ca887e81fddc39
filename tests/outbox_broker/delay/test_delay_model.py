"""The schedule against a sorted list, over two years that Hypothesis invents: any call, clock steps, kills.

Two topics share ids, and cancels are good for one of them or for both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from outbox_broker.log.storage import DiskStorage
from outbox_broker.schedule.delay_options import DelayOptions
from outbox_broker.schedule.delay_store import DueBatch, TimedMessage
from outbox_broker.schedule.recent_cancels import CANCEL_MEMORY_MS, Cancel
from outbox_broker.schedule.schedule_queries import ScheduledListing
from outbox_core.messages.limits import DELAY_MAX_MS
from tests.outbox_broker.delay.conftest import (
    DAY_MS,
    HOUR_MS,
    NOW_MS,
    SECOND_MS,
    Opened,
    flush,
    recorded,
    settle,
    timed,
)
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster

AHEAD = st.one_of(
    st.integers(-DAY_MS, SECOND_MS),
    st.integers(0, 3 * HOUR_MS),
    st.integers(0, 3 * DAY_MS),
    st.integers(0, 60 * DAY_MS),
    st.integers(0, DELAY_MAX_MS),
)
PASSING = st.one_of(
    st.integers(0, SECOND_MS), st.integers(0, HOUR_MS), st.integers(0, 3 * DAY_MS), st.integers(0, 60 * DAY_MS)
)

SPANS_MS = (SECOND_MS, HOUR_MS, DAY_MS, 30 * DAY_MS)
TOPICS = ("t", "u")
SCOPES = (None, ("t",), ("u",))
FIRED_MEMORY_MS = DelayOptions().fired_memory_ms
Place = tuple[str, str]
"""A message's topic and id."""


class NoSync(DiskStorage):
    """The machine runs on, only the process is killed."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class ScheduleMachine(RuleBasedStateMachine):
    """What is scheduled is a dictionary here, and its order is sorted anew each time."""

    opened: Callable[[Path], Opened] = staticmethod(lambda folder: Opened(folder, storage=NoSync()))

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._opened = self.opened(Path(self._folder.name))
        self._schedule = self._opened.open(
            memory_messages_max=9,
            batch_messages_max=3,
            hand_outs_max=2,
            expand_messages_max=2,
            expand_above_messages=3,
            log_bytes_max=20_000,
            index_pieces_max=3,
            index_merged_pieces_max=2,
        )
        self.now_ms = self.latest_ms = NOW_MS
        self.made = 0
        self.arrived = 0
        self.waiting: dict[Place, tuple[int, int]] = {}
        self.canceled: set[Place] = set()
        self.remembered: list[Cancel] = []
        self.delivered: dict[Place, int] = {}
        """Due times."""
        self.out: list[DueBatch] = []
        self.again: list[DueBatch] = []

    def teardown(self) -> None:
        self._opened.drop()
        self._folder.cleanup()

    @rule(ahead=st.lists(AHEAD, min_size=1, max_size=5), topics=st.sampled_from([("t",), ("u",), TOPICS]))
    def schedule(self, ahead: list[int], topics: tuple[str, ...]) -> None:
        batch = []
        for ahead_ms in ahead:
            self.made += 1
            batch += [timed(f"m{self.made}", self.now_ms + ahead_ms, topic=topic) for topic in topics]
        self._schedule_all(batch)

    @rule(ahead=AHEAD, back=st.integers(0, 12), topic=st.sampled_from(TOPICS))
    def schedule_an_id_of_the_other_topic(self, ahead: int, back: int, topic: str) -> None:
        place = (topic, f"m{self.made - back}")
        if place not in self.waiting and place not in self.canceled and place not in self.delivered:
            self._schedule_all([timed(place[1], self.now_ms + ahead, topic=topic)])

    def _schedule_all(self, batch: list[TimedMessage]) -> None:
        for one in batch:
            self.arrived += 1
            early = (cancel.scope for cancel in self.remembered if (cancel.id, cancel.topic) == (one.id, None))
            if any(scope is None or one.topic in scope for scope in early):
                self.canceled.add((one.topic, one.id))
            else:
                self.waiting[one.topic, one.id] = (one.due_ms, self.arrived)
        assert self._schedule.schedule(batch, now_ms=self.now_ms) == ["stored"] * len(batch)
        self._note_remembered()

    @rule(number=st.integers(0, 60), topic=st.sampled_from(TOPICS))
    def repeat(self, number: int, topic: str) -> None:
        message_id = f"m{number}"
        if (topic, message_id) in self.waiting:
            again = timed(message_id, self.now_ms + number, topic=topic)
            assert self._schedule.schedule([again], now_ms=self.now_ms) == ["duplicate"]

    @rule(back=st.lists(st.integers(-2, 12), max_size=4), scope=st.sampled_from(SCOPES))
    def cancel(self, back: list[int], scope: tuple[str, ...] | None) -> None:
        ids = list(dict.fromkeys(f"m{self.made - one}" for one in back))
        before = {(one.topic, one.id) for one in self.remembered}
        said = dict(zip(ids, self._schedule.cancel(ids, now_ms=self.now_ms, scope=scope), strict=True))
        for message_id, status in said.items():
            places = {(topic, message_id) for topic in scope or TOPICS}
            known = places & self.canceled & before
            if places & self.canceled and not known and not places & self.waiting.keys():
                continue  # more than a week ago: only that it is not delivered is known
            if known or places & self.waiting.keys():
                assert status == "canceled"
                self.canceled |= places & self.waiting.keys()
            elif places & self.delivered.keys():
                assert status == "too_late" or not self._must_be_known(places)
            else:
                assert status == "unknown"
        for place in self.canceled:
            self.waiting.pop(place, None)
        asked = [one for one, status in said.items() if status != "too_late"]
        self._note_remembered()
        assert {one.id for one in self.remembered} >= set(asked)

    def _must_be_known(self, places: set[Place]) -> bool:
        """Whether one of these was due within a day, or is in a batch that is not settled."""
        unsettled = {place for batch in (*self.out, *self.again) for place in zip(batch.topics, batch.ids, strict=True)}
        return any(
            place in unsettled or self.delivered[place] >= self.latest_ms - FIRED_MEMORY_MS
            for place in places & self.delivered.keys()
        )

    def _note_remembered(self) -> None:
        """Cancels that hold are known by their scope; what was canceled more than a week before may be forgotten."""
        found = recorded(self._opened).canceled.stored()
        lost = [one for one in self.remembered if one not in found]
        assert all(one.at_ms < self.now_ms - CANCEL_MEMORY_MS for one in lost)
        self.remembered = found

    @rule(passing_ms=PASSING)
    def pass_time(self, passing_ms: int) -> None:
        self.now_ms += passing_ms
        self.latest_ms = max(self.latest_ms, self.now_ms)

    @rule(step_ms=st.integers(-5 * DAY_MS, 5 * DAY_MS))
    def step_clock(self, step_ms: int) -> None:
        self.now_ms = max(NOW_MS, self.now_ms + step_ms)
        self.latest_ms = max(self.latest_ms, self.now_ms)

    @rule()
    def hand_out(self) -> None:
        batch = self._schedule.due(self.now_ms)
        if self.again:
            assert batch == self.again.pop(0)
            self.out.append(batch)
            return
        due = sorted(one for one in self.waiting if self.waiting[one][0] <= self.now_ms)
        due.sort(key=lambda one: self.waiting[one])
        if batch is None:
            assert not due or len(self.out) == 2
            return
        places = [(message.topic, message.id) for message in batch.messages]
        assert places == due[: len(places)]
        assert batch.messages == [timed(one, max(0, self.waiting[topic, one][0]), topic=topic) for topic, one in places]
        for place in places:
            self.delivered[place] = self.waiting.pop(place)[0]
        self.out.append(batch)

    @rule(last=st.booleans())
    def settle_batch(self, *, last: bool) -> None:
        if self.out:
            self._schedule.fired(self.out.pop(-1 if last else 0).number)

    @rule(taken=st.integers(1, 2))
    def settle_a_part_of_the_last_batch_and_restart(self, taken: int) -> None:
        if self.out and len(self.out[-1]) > taken:
            batch = self.out.pop()
            self._schedule.fired_in_part(batch.number, done=batch.seqs[:taken])
            self._schedule.close()
            self.out.append(batch.without(set(range(taken))))
            self.kill()

    @rule(steps=st.integers(1, 30))
    def maintain(self, steps: int) -> None:
        for _ in range(steps):
            self._schedule.housekeeping.step(self.now_ms)

    @rule()
    def settle_everything(self) -> None:
        settle(self._schedule, self.now_ms)

    @rule()
    def flush(self) -> None:
        flush(self._schedule, self.now_ms)

    @rule()
    def kill(self) -> None:
        self._schedule = self._opened.open()
        self.again = sorted([*self.again, *self.out], key=lambda one: one.number)
        self.out = []

    @rule()
    def look(self) -> None:
        found = self._schedule.queries.histogram(topic=None, from_ms=0, to_ms=1 << 60, bucket_ms=DAY_MS)
        assert sum(count for _, count in found) == len(self.waiting) == self._schedule.queries.count()
        within = [sum(due_ms <= self.now_ms + span_ms for due_ms, _ in self.waiting.values()) for span_ms in SPANS_MS]
        assert self._schedule.queries.due_within(SPANS_MS, now_ms=self.now_ms) == [*within, len(self.waiting)]
        for (topic, message_id), (due_ms, _) in list(self.waiting.items())[-3:]:
            assert self._schedule.queries.find(message_id, (topic,)) == ScheduledListing(
                message_id, topic, max(0, due_ms)
            )
            first = self._schedule.queries.find(message_id)
            assert first is not None
            assert first.due_ms <= max(0, due_ms)


ScheduleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestScheduleModel = ScheduleMachine.TestCase


class ScheduleOnLedgersMachine(ScheduleMachine):
    """The same on ledgers, where messages arrive in any order."""

    opened = staticmethod(lambda folder: Opened(folder, opener=LedgerCluster().open))


ScheduleOnLedgersMachine.TestCase.settings = ScheduleMachine.TestCase.settings
TestScheduleModelOnLedgers = ScheduleOnLedgersMachine.TestCase
