"""The schedule against a sorted list, over two years that Hypothesis invents: any call, clock steps, kills."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from broker.delay import id_index
from broker.delay.remembered import CANCEL_MEMORY_MS
from broker.delay.store import Batch
from broker.log.storage import DiskStorage
from messaging.limits import DELAY_MAX_MS
from tests.broker.delay.conftest import DAY_MS, HOUR_MS, NOW_MS, SECOND_MS, Opened, flush, settle, timed

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


class NoSync(DiskStorage):
    """The machine runs on, only the process is killed."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class ScheduleMachine(RuleBasedStateMachine):
    """What is scheduled is a dictionary here, and its order is sorted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(id_index, "PIECES_MAX", 3)
        self._patch.setattr(id_index, "MERGED_PIECES", 2)
        self._opened = Opened(Path(self._folder.name))
        self._schedule = self._opened.open(
            storage=NoSync(),
            memory_messages_max=9,
            batch_messages_max=3,
            hand_outs_max=2,
            expand_messages_max=2,
            log_bytes_max=20_000,
        )
        self.now_ms = NOW_MS
        self.made = 0
        self.waiting: dict[str, tuple[int, int]] = {}
        self.early: set[str] = set()
        self.canceled: set[str] = set()
        self.remembered: dict[str, int] = {}
        self.delivered: set[str] = set()
        self.out: list[Batch] = []
        self.again: list[Batch] = []

    def teardown(self) -> None:
        self._opened.drop()
        self._patch.undo()
        self._folder.cleanup()

    @rule(ahead=st.lists(AHEAD, min_size=1, max_size=5))
    def schedule(self, ahead: list[int]) -> None:
        batch = []
        for ahead_ms in ahead:
            self.made += 1
            batch.append(timed(f"m{self.made}", self.now_ms + ahead_ms))
            if batch[-1].id in self.early:
                self.canceled.add(batch[-1].id)
            else:
                self.waiting[batch[-1].id] = (batch[-1].due_ms, self.made)
        assert self._schedule.schedule(batch, now_ms=self.now_ms) == ["stored"] * len(batch)

    @rule(number=st.integers(0, 60))
    def repeat(self, number: int) -> None:
        message_id = f"m{number}"
        if message_id in self.waiting:
            again = timed(message_id, self.now_ms + number)
            assert self._schedule.schedule([again], now_ms=self.now_ms) == ["duplicate"]

    @rule(back=st.lists(st.integers(-2, 12), max_size=4))
    def cancel(self, back: list[int]) -> None:
        ids = list(dict.fromkeys(f"m{self.made - one}" for one in back))
        said = dict(zip(ids, self._schedule.cancel(ids, now_ms=self.now_ms), strict=True))
        for message_id, status in said.items():
            if message_id in self.canceled and message_id not in self.remembered:
                continue  # more than a week ago: only that it is not delivered is known
            if message_id in self.waiting or message_id in self.canceled:
                assert status == "canceled"
                self.canceled.add(message_id)
            elif message_id in self.delivered:
                assert status == "too_late"
            else:
                assert status == "unknown"
                self.early.add(message_id)
        self._remember([one for one, status in said.items() if status != "too_late" and one not in self.remembered])
        for message_id in self.canceled:
            self.waiting.pop(message_id, None)

    def _remember(self, ids: list[str]) -> None:
        """Cancels that were written down; what was canceled more than a week before is forgotten then."""
        self.remembered.update(dict.fromkeys(ids, self.now_ms))
        while ids and next(iter(self.remembered.values())) < self.now_ms - CANCEL_MEMORY_MS:
            oldest = next(iter(self.remembered))
            del self.remembered[oldest]
            self.early.discard(oldest)

    @rule(passing_ms=PASSING)
    def pass_time(self, passing_ms: int) -> None:
        self.now_ms += passing_ms

    @rule(step_ms=st.integers(-5 * DAY_MS, 5 * DAY_MS))
    def step_clock(self, step_ms: int) -> None:
        self.now_ms = max(NOW_MS, self.now_ms + step_ms)

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
        ids = [message.id for message in batch.messages]
        assert ids == due[: len(ids)]
        assert batch.messages == [timed(one, max(0, self.waiting[one][0])) for one in ids]
        for message_id in ids:
            del self.waiting[message_id]
            self.delivered.add(message_id)
        self.out.append(batch)

    @rule(last=st.booleans())
    def settle_batch(self, *, last: bool) -> None:
        if self.out:
            self._schedule.fired(self.out.pop(-1 if last else 0).number)

    @rule(steps=st.integers(1, 30))
    def maintain(self, steps: int) -> None:
        for _ in range(steps):
            self._schedule.maintain(self.now_ms)

    @rule()
    def settle_everything(self) -> None:
        settle(self._schedule, self.now_ms)

    @rule()
    def flush(self) -> None:
        flush(self._schedule, self.now_ms)

    @rule()
    def kill(self) -> None:
        self._schedule = self._opened.open(storage=NoSync())
        self.again = sorted([*self.again, *self.out], key=lambda one: one.number)
        self.out = []

    @rule()
    def look(self) -> None:
        found = self._schedule.histogram(topic=None, from_ms=0, to_ms=1 << 60, bucket_ms=DAY_MS)
        assert sum(count for _, count in found) == len(self.waiting) == self._schedule.count()
        within = [sum(due_ms <= self.now_ms + span_ms for due_ms, _ in self.waiting.values()) for span_ms in SPANS_MS]
        assert self._schedule.due_within(SPANS_MS, now_ms=self.now_ms) == [*within, len(self.waiting)]
        for message_id, (due_ms, _) in list(self.waiting.items())[-3:]:
            listed = self._schedule.find(message_id)
            assert listed is not None
            assert listed.due_ms == max(0, due_ms)


ScheduleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestScheduleModel = ScheduleMachine.TestCase
