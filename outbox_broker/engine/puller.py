"""Pulls: delivers messages to groups. The group decides (consumer_group), this reads, records and returns them.

All pulls are one: at once where nothing may have to wait (take_at_hand), in a thread that may block (take), or in one
that waits for its first message (pull).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar, cast

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dead_letter_writer import DeadLetterWriter
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.log_writer import LogWriter
from outbox_broker.engine.redrive_clock import RedriveClock
from outbox_broker.engine.wakeups import RecentGroupDeletions, Wakeups, group_deleted
from outbox_broker.group.consumer_group import Death, DeathCause, DeliveryRun, Group, Requeue
from outbox_broker.group.key_order import KeyOrder
from outbox_broker.group.key_order_decision import decide_filing, may_deliver
from outbox_broker.group.receipt import receipts_of
from outbox_broker.journal.message_reader import Found, read_runs
from outbox_broker.log.topic_index import PlaceRun, TopicIndex
from outbox_broker.state.client_topic_quota import ClientTopicQuota
from outbox_broker.state.engine_state import Topic
from outbox_core.common.errors import InvalidMessage
from outbox_core.journal import journal
from outbox_core.journal.order_records import Filed
from outbox_core.messages.limits import INVISIBLE_MS_MAX, INVISIBLE_MS_MIN, PULL_MESSAGES_MAX, PULL_WAIT_MS_MAX
from outbox_core.messages.message import Delivery, Record, check_group, check_topic
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_PASSES_MAX: Final = 1_000
DAMAGED: Final = "its record in the message log is damaged"
AT_HAND_BYTES_MAX: Final = 64 * 1024
"""Reading this much of what was just written does not wait for the disk: it is in the page cache."""
Polled = TypeVar("Polled")


@dataclass(frozen=True, slots=True)
class PullShare:
    """How a pull is shared between messages that failed before and fresh ones. At least half of it is for fresh
    messages, if so many wait; a pull of one alternates. What one kind leaves goes to the other.

    Without it a group whose messages fail as fast as they are retried would see nothing fresh until all of them are
    dead letters.
    """

    count_max: int
    retries: int
    """How many messages wait to be delivered again."""
    fresh_first: bool
    """Whether a pull of one is for a fresh message."""
    fresh_max: int = 0
    """How many fresh messages the group may have in flight in addition."""

    @property
    def retries_min(self) -> int:
        """Returns how many retries are delivered however many fresh messages wait."""
        reserved = self.count_max // 2 if self.count_max > 1 else int(not self.fresh_first)
        return min(self.retries, reserved)

    @property
    def fresh_most(self) -> int:
        """Returns how many fresh messages may be delivered."""
        return min(self.fresh_max, self.count_max - self.retries_min)


@dataclass(frozen=True, slots=True)
class PullChoice:
    """What a pull intends to deliver, before it is read: ranges of sequences, and the runs that contain them.

    The first `retry_ranges` of `wanted` are of messages to be delivered again. Where a filter or the order of keys
    decides what is deliverable, more is read than is delivered: `share` is applied to what is left.
    """

    now_ms: int
    wanted: list[tuple[int, int]]
    retry_ranges: int
    runs: list[list[PlaceRun]]
    fresh: tuple[int, int]
    count_max: int
    share: PullShare
    begins: bool
    seek_generation: int
    moves: int


@dataclass(frozen=True, slots=True)
class PulledMessages:
    """A delivery with its records, one for each of its messages."""

    out: DeliveryRun
    records: list[Record]

    def receipts(self, topic: str, group: str) -> list[str]:
        """Returns the receipt of each message."""
        out = self.out
        return receipts_of(
            topic, group, first=out.first, count=out.count, delivery=out.delivery, generation=out.generation
        )


class Puller:
    """Deliveries to groups."""

    def __init__(
        self, context: EngineContext, writer: LogWriter, wakeups: Wakeups, groups: GroupRegistry,
        dead_letters: DeadLetterWriter, deleted: RecentGroupDeletions, footer_repair: FooterRepair,
        dispatcher: Dispatcher, redrive_clock: RedriveClock,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._writer = writer
        self._wakeups = wakeups
        self._redrive_clock = redrive_clock
        self._groups = groups
        self._dead_letters = dead_letters
        self._deleted = deleted
        self._footer_repair = footer_repair
        self._dispatcher = dispatcher

    def take(
        self, topic: str, group: str, *, max_messages: int, invisible_ms: int, consumer: str | None = None,
        dispatches: bool = True, since: int | None = None, quota: ClientTopicQuota | None = None, begins: bool = False,
    ) -> list[PulledMessages]:  # fmt: skip
        """Deliver ready messages, as runs of records.

        If there are none, and `dispatches` is set, due messages are dispatched first. A pull that can wait leaves that
        to the timer: its own message may come with the next round, and a dispatch might move a million others (beside a
        burst it took up to 180 ms). One pull per group at a time: it chooses under the engine's lock, reads the disk
        without it, and delivers what is still available under the lock again. So a group that reads old messages slows
        down only itself. `since`: the number of deletions when the calling pull started: it ends with GroupDeleted if
        its group was deleted later, and does not create it again. `quota`: how many topics its client may have.
        """
        self._deleted.refuse_if_deleted(topic, group, since=since)
        if dispatches and self._dispatcher.may_be_dispatching() and not self._is_ready(topic, group):
            self._dispatcher.dispatch_unless_disk_is_full()
        found_topic, found_group = self._opened(topic, group, quota)
        with found_group.pulling:
            scanned = 0
            for _ in range(_PASSES_MAX):
                choice = self._footer_repair.looked_up(
                    partial(self.choose, found_topic, found_group, count_max=max_messages, begins=begins)
                )
                if choice is None:
                    return []
                records = self.read(choice)
                with self._lock:
                    self._context.refuse_if_closed()
                    pulled = self.deliver(
                        found_topic, found_group, choice, records, invisible_ms=invisible_ms, consumer=consumer
                    )
                if pulled:
                    return pulled
                if choice.share.retries and not choice.retry_ranges:
                    continue  # it was the turn of fresh messages, and none is deliverable: suspected ones are next
                scanned += len(records)
                if found_group.order is not None and scanned < self._options.filter_scan_max:
                    continue
                if found_group.accepts is not None or found_group.order is not None:
                    self._wakeups.wake(topic, group)  # to continue the scan, once others have had their turn
                    return []
        return []

    def take_at_hand(
        self, topic: str, group: str, *, max_messages: int, invisible_ms: int, consumer: str | None = None,
        dispatches: bool = True, since: int | None = None, begins: bool = False,
    ) -> list[PulledMessages] | None:  # fmt: skip
        """Like take(), if it needs no wait: for no lock, no disk, no other pull. None, with nothing delivered, if it
        might: then call take(), in a thread that may block.

        For callers such as an event loop. A thread for each pull took as long again: from a publish to the answer of a
        waiting pull 0.4 ms instead of 0.24.
        """
        if (dispatches and self._dispatcher.may_be_dispatching()) or not self._lock.acquire(blocking=False):
            return None
        try:
            self._context.refuse_if_closed()
            self._deleted.refuse_if_deleted(topic, group, since=since)
            found_topic, found_group = self._state.topics.get(topic), self._state.group(topic, group)
            if (
                found_topic is None
                or found_group is None
                or found_group.accepts is not None
                or found_group.order is not None
            ):
                return None
            if not found_group.pulling.acquire(blocking=False):
                return None
            try:
                now_ms = self._redrive_clock.now_ms()
                if not _is_chosen_at_once(found_topic.index, found_group, now_ms=now_ms, count_max=max_messages):
                    return None
                choice = self.choose(found_topic, found_group, count_max=max_messages, begins=begins, now_ms=now_ms)
                if choice is None:
                    return []
                if not self._is_at_hand(choice):
                    return None
                records = self.read(choice)
                if any(record is None or (record.deliver_at_ms or 0) > now_ms for _, record in records):
                    return None  # each of these takes an action of its own to set aside
                return (
                    self.deliver(
                        found_topic, found_group, choice, records, invisible_ms=invisible_ms, consumer=consumer
                    )
                    or None
                )
            finally:
                found_group.pulling.release()
        finally:
            self._lock.release()

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = 30_000,
        consumer: str | None = None,
        begins: bool = False,
    ) -> list[Delivery]:
        """Deliver ready messages, waiting up to `wait_ms` for the first one.

        An unknown group starts at the earliest. Raises GroupDeleted if it is deleted meanwhile.
        """
        check_topic(topic)
        check_group(group)
        check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        check_within("invisible_ms", invisible_ms, INVISIBLE_MS_MIN, INVISIBLE_MS_MAX)
        deadline_ms = self._clock.monotonic_ms() + wait_ms
        take = partial(
            self.take, topic, group, max_messages=max_messages, invisible_ms=invisible_ms, consumer=consumer,
            dispatches=not wait_ms, since=self._deleted.deletions, begins=begins,
        )  # fmt: skip
        pulled_runs = take() or self.awaited(topic, group, take, deadline_ms=deadline_ms)
        return [delivery for run in pulled_runs or () for delivery in deliveries_of(topic, group, run)]

    def awaited(self, topic: str, group: str, poll: Callable[[], Polled | None], *, deadline_ms: int) -> Polled | None:
        """Returns the result of `poll` once it finds something; None, or an empty result, when the time is up."""
        if deadline_ms <= self._clock.monotonic_ms():
            return None
        arrived = threading.Condition()
        woken = False

        def wake() -> None:
            nonlocal woken
            with arrived:
                woken = True
                arrived.notify_all()

        unsubscribe = self._wakeups.subscribe(topic, group, wake)
        with self._lock:
            self._wakeups.pulls_waiting[topic, group] += 1
        try:
            while True:
                woken = False
                result = poll()
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if result or left_ms <= 0 or self._context.closed:
                    return result
                with arrived:
                    if not woken:
                        self._clock.wait(arrived, left_ms)
        finally:
            unsubscribe()
            with self._lock:
                self._wakeups.pulls_waiting[topic, group] -= 1
                if not self._wakeups.pulls_waiting[topic, group]:
                    del self._wakeups.pulls_waiting[topic, group]

    def _opened(self, topic: str, name: str, quota: ClientTopicQuota | None) -> tuple[Topic, Group]:
        """Returns a topic and a group, created if new; its deletion meanwhile is detected later, under the lock."""
        known_topic = self._state.topics.get(topic)
        group = None if known_topic is None else known_topic.groups.get(name)
        if known_topic is not None and group is not None:
            return known_topic, group
        with self._lock:
            self._context.refuse_if_closed()
            return self._groups.open_group(topic, name, quota)

    def _is_ready(self, topic: str, group: str) -> bool:
        """Returns whether a matching message is available already, so that the pull need not wait for due ones."""
        with self._lock:
            found_group = self._state.group(topic, group)
            if (
                found_group is None
                or found_group.paused
                or found_group.order is not None
                or found_group.accepts is not None
            ):
                return False
            index, end = self._state.topic(topic).index, self._context.messages.committed
            return index.visible_end(found_group.position, count_max=1, durable_end=end) > found_group.position

    def choose(
        self, topic: Topic, group: Group, *, count_max: int, begins: bool = False, now_ms: int | None = None
    ) -> PullChoice | None:
        """Returns what to read for a delivery; None if nothing is ready.

        A consumer that `begins` says which message it handles. For another one, messages of which one may have ended
        their consumer are chosen by themselves, in turn with fresh ones.
        """
        self._context.refuse_if_closed()
        if group.is_deleted:
            raise group_deleted(topic.index.name, group.name)
        now_ms = self._redrive_clock.now_ms() if now_ms is None else now_ms
        group.pulled_at_ms = now_ms
        if group.paused:
            return None
        self._groups.skip_filtered(topic, group)
        for _ in range(_PASSES_MAX):
            again, deaths = group.visible_again(now_ms=now_ms, count_max=count_max, isolates=not begins)
            if not deaths:
                break
            self._dead_letters.bury(topic.index.name, group, deaths, at_ms=now_ms)
        share = PullShare(count_max, retries=_count(again), fresh_first=group.fresh_first)
        chosen = partial(self._chosen, topic, group, now_ms=now_ms, share=share, begins=begins)
        if begins or not again or not group.is_suspected(again[0][0]):
            return chosen(again=again, fresh_max=None)
        fresh = chosen(again=[], fresh_max=None) if group.fresh_first else None
        return fresh or chosen(again=again, fresh_max=0)

    def _chosen(
        self, topic: Topic, group: Group, *, again: list[tuple[int, int]], fresh_max: int | None, now_ms: int,
        share: PullShare, begins: bool,
    ) -> PullChoice | None:  # fmt: skip
        """Returns what to read: of retries and fresh messages each its share, of the latter up to `fresh_max`."""
        index, count_max = topic.index, share.count_max
        if fresh_max is None:
            reserved = _first_of(again, share.retries_min)
            wanted_max = count_max - _count(reserved)
            fresh_max = self._room_in_hand(index.name, group, fresh_wanted=wanted_max, again=reserved)
        fresh_count = fresh_max
        filed: list[tuple[int, int]] = []
        if group.order is not None:
            filed, fresh_count = group.order.to_read(fresh_count, scan_max=self._options.filter_scan_max)
        elif group.accepts is not None and fresh_count:
            fresh_count = max(fresh_count, self._options.filter_scan_max)
        end = index.visible_end(group.position, count_max=fresh_count, durable_end=self._context.messages.committed)
        fresh = (group.position, max(end, group.position))
        if group.order is None and group.accepts is None:  # else what is deliverable is known when it is read
            again = _first_of(again, count_max - (fresh[1] - fresh[0]))
        retries = group.located(index, again)
        located = [*retries, *group.located(index, filed)]
        if end > group.position:
            located.append((fresh, list(index.runs(*fresh))))
        if not located:
            return None
        return PullChoice(
            now_ms, [span for span, _ in located], len(retries), [runs for _, runs in located], fresh=fresh,
            count_max=_count(again) + fresh_max, share=replace(share, fresh_max=fresh_max), begins=begins,
            seek_generation=group.seek_generation, moves=group.moves,
        )  # fmt: skip

    def read(self, choice: PullChoice) -> list[Found]:
        """Read what was chosen, up to `pull_bytes_max` of bodies; None stands for a damaged record.

        Where messages to be delivered again and fresh ones wait, each gets half of the bytes, and what the first to be
        read leaves goes to the other. They take turns at being the first: one large body may use up both shares.
        """
        bytes_max = self._options.pull_bytes_max
        retries, fresh = slice(0, choice.retry_ranges), slice(choice.retry_ranges, None)
        if not choice.wanted[retries] or not choice.wanted[fresh]:
            return self._read_part(choice, slice(None), bytes_max=bytes_max)
        first, second = (fresh, retries) if choice.share.fresh_first else (retries, fresh)
        of_first = self._read_part(choice, first, bytes_max=bytes_max // 2)
        bytes_left = bytes_max - body_bytes(of_first)
        of_second = self._read_part(choice, second, bytes_max=bytes_left) if bytes_left > 0 else []
        return of_second + of_first if choice.share.fresh_first else of_first + of_second

    def _is_at_hand(self, choice: PullChoice) -> bool:
        runs = [run for range_runs in choice.runs for run in range_runs]
        oldest = self._context.messages.end - self._options.immediate_pull_lag_bytes_max
        return sum(run.size_bytes for run in runs) <= AT_HAND_BYTES_MAX and all(run.offset >= oldest for run in runs)

    def _read_part(self, choice: PullChoice, part: slice, *, bytes_max: int) -> list[Found]:
        records: list[Found] = []
        bytes_left = bytes_max
        for (first, end), runs in zip(choice.wanted[part], choice.runs[part], strict=True):
            if bytes_left < 0:
                break
            records += read_runs(self._context.messages, runs, first=first, end=end, bytes_max=bytes_left)
            bytes_left -= sum(run.size_bytes for run in runs)
        return first_within(records, bytes_max=bytes_max)

    def deliver(
        self, topic: Topic, group: Group, choice: PullChoice, records: Sequence[Found], *, invisible_ms: int,
        consumer: str | None,
    ) -> list[PulledMessages]:  # fmt: skip
        """Deliver what was read and is still available. Empty if all of it is to be set aside, or has moved."""
        if group.is_deleted:
            raise group_deleted(topic.index.name, group.name)
        if group.paused or choice.seek_generation != group.seek_generation:
            return []
        if choice.moves != group.moves and any(record is None for _, record in records):
            return []  # retention moved it, and dropped its segment, while it was read
        available = _still_there(group, choice, records)
        if group.order is not None:
            available = self._in_order(topic, group, group.order, choice, available)
        if choice.share.retries:
            group.fresh_first = not group.fresh_first
        fit = self._shared_fit(topic, group, choice, available)
        if not fit:
            return []
        runs = _runs_of(fit)
        delivery_runs = group.decide_delivery(
            [(first, first + len(run_records)) for first, run_records in runs], epoch=self._state.epoch
        )
        self._writer.act(
            journal.Handed(
                topic=topic.index.name, group=group.name, at_ms=choice.now_ms,
                visible_at_ms=choice.now_ms + invisible_ms, consumer=consumer,
                runs=[journal.HandedRun(run.first, run.count, run.delivery, run.attempt) for run in delivery_runs],
                begins=choice.begins,
            )
        )  # fmt: skip
        self._count_delivered(topic.index.name, group.name, delivery_runs)
        if len(delivery_runs) == len(runs):
            return [PulledMessages(run, run_records) for run, (_, run_records) in zip(delivery_runs, runs, strict=True)]
        by_sequence = dict(fit)
        return [
            PulledMessages(run, [by_sequence[sequence] for sequence in range(run.first, run.end)])
            for run in delivery_runs
        ]

    def _shared_fit(
        self, topic: Topic, group: Group, choice: PullChoice, records: Sequence[Found]
    ) -> list[tuple[int, Record]]:
        """Returns the records that are deliverable, of retries and fresh messages each its share."""
        if not choice.retry_ranges:
            fresh_max = min(choice.share.fresh_max, choice.share.count_max)
            return self._fit(topic, group, records, now_ms=choice.now_ms, count_max=fresh_max)
        if group.order is None:
            again = [entry for entry in records if entry[0] < choice.fresh[0]]
            fresh = records[len(again) :]
        else:
            again = [entry for entry in records if group.unsettled.find(entry[0]) is not None]
            fresh = [entry for entry in records if group.unsettled.find(entry[0]) is None]
        share = choice.share
        fit_again = self._fit(topic, group, again, now_ms=choice.now_ms, count_max=len(again))
        share = replace(share, retries=len(fit_again))
        fit_fresh = self._fit(topic, group, fresh, now_ms=choice.now_ms, count_max=share.fresh_most)
        return fit_again[: share.count_max - len(fit_fresh)] + fit_fresh

    def _in_order(
        self, topic: Topic, group: Group, order: KeyOrder, choice: PullChoice, records: Sequence[Found]
    ) -> Sequence[Found]:
        """File messages in the key order; returns those that may be delivered now."""
        by_sequence = dict(records)  # ready messages may be among those looked up, too
        filing = decide_filing(group, order, by_sequence, count_max=choice.count_max)
        if filing.runs:
            self._writer.act(
                Filed(
                    topic=topic.index.name, group=group.name, at_ms=choice.now_ms, position=filing.position,
                    runs=filing.runs,
                )
            )  # fmt: skip
        elif filing.position > group.position:
            group.skip(filing.position - 1)
        self._groups.count_filtered(topic.index.name, group.name, filing.filtered)
        order.record_scan(filing.scanned, backlog_scan_end=filing.backlog_scan_end, enough=filing.is_enough)
        if not choice.count_max:
            return []
        return [
            entry
            for entry in by_sequence.items()
            if entry[0] in filing.unordered or may_deliver(group, order, entry[0])
        ]

    def _room_in_hand(self, topic: str, group: Group, *, fresh_wanted: int, again: Sequence[tuple[int, int]]) -> int:
        """Returns how many fresh messages a group may get besides redelivered ones, up to `fresh_wanted`; if fewer, its
        pulls are woken when there is room.

        Messages waiting for another attempt use capacity of their own group alone, and those waiting for a redrive use
        none: so no group's retries block other groups, however long they are delayed. Nor do other groups' consumers:
        each group has `group_in_hand_min` of its own, whatever all others hold.
        """
        options = self._options
        back, redriven = group.returning(again)
        own = options.group_in_hand_min - group.unsettled.in_flight - back
        room = min(
            options.group_in_hand_max - group.unsettled.delivered - redriven,
            max(options.in_hand_max - self._state.in_flight_total.count - back, own),
        )
        if room < fresh_wanted:  # fewer messages, as SQS above its 120,000: a consumer could not act on an error
            self._wakeups.note_short(topic, group.name)
        return min(fresh_wanted, max(room, 0))

    def _count_delivered(self, topic: str, group: str, delivery_runs: Sequence[DeliveryRun]) -> None:
        self._state.counters["delivered", topic, group] += sum(run.count for run in delivery_runs)
        again = sum(run.count for run in delivery_runs if run.again)
        if again:
            self._state.counters["redelivered", topic, group] += again

    def _fit(
        self, topic: Topic, group: Group, records: Sequence[Found], *, now_ms: int, count_max: int
    ) -> list[tuple[int, Record]]:
        """Returns the records up to the first that is not deliverable; undeliverable ones at the head are set aside.

        Messages that the filter rejects are skipped: at the head by advancing the position, after a record by that
        record's delivery or, if it is the last, by the next pull. Setting aside advances the group's position in the
        action log, so it never happens before earlier messages were recorded.
        """
        if (
            group.accepts is None
            and len(records) <= count_max
            and all(record is not None and (record.deliver_at_ms or 0) <= now_ms for _, record in records)
        ):
            return cast("list[tuple[int, Record]]", records)
        fit: list[tuple[int, Record]] = []
        filtered = behind = 0
        for sequence, record in records:
            if record is not None and (record.deliver_at_ms or 0) <= now_ms:
                if group.accepts is None or _is_wanted(group, sequence, record):
                    fit.append((sequence, record))
                    filtered, behind = filtered + behind, 0
                    if len(fit) == count_max:
                        break
                elif fit:
                    behind += 1
                else:
                    group.skip(sequence)
                    filtered += 1
            elif fit:
                break
            else:
                self._put_aside(topic.index.name, group, sequence, record, at_ms=now_ms)
        self._groups.count_filtered(topic.index.name, group.name, filtered)
        return fit

    def _put_aside(self, topic: str, group: Group, sequence: int, record: Record | None, *, at_ms: int) -> None:
        """Make a damaged record a dead letter rather than block its group; defer one that is early, because the wall
        clock stepped back after it became due.
        """
        run = group.unsettled.find(sequence)
        if record is None:
            logger.error("record_quarantined", extra={"topic": topic, "sequence": sequence})
            self._state.counters["quarantined", topic, ""] += 1
            death = Death(sequence, 1, 0, DAMAGED, DeathCause.DAMAGED)
            self._dead_letters.bury(topic, group, [death], at_ms=at_ms)
        else:
            hold = group.decide_deferral(sequence, until_ms=record.deliver_at_ms or 0)
            self.requeue(
                topic, group.name, [hold], at_ms=at_ms, reason=group.reason_of(run) if run else None,
                expired=run is not None and run.in_flight,
            )  # fmt: skip

    def requeue(
        self, topic: str, group: str, decisions: Iterable[Requeue | Death], *, at_ms: int, reason: str | None,
        expired: bool = False,
    ) -> None:  # fmt: skip
        """Record when messages may be delivered again; deaths among the decisions are not recorded here."""
        entries: list[tuple[int, int, int, int]] = [
            (decision.first, decision.count, decision.visible_at_ms, decision.attempts_used)
            for decision in decisions
            if isinstance(decision, Requeue)
        ]
        if entries:
            self._writer.act(
                journal.Requeued(topic=topic, group=group, at_ms=at_ms, entries=entries, reason=reason, expired=expired)
            )


def deliveries_of(topic: str, group: str, run: PulledMessages) -> list[Delivery]:
    """Returns the deliveries of a run."""
    attempt, expired = run.out.attempt, run.out.expired
    return [
        Delivery(receipt=receipt, attempt=attempt, message=record, expired=expired)
        for receipt, record in zip(run.receipts(topic, group), run.records, strict=True)
    ]


def _is_chosen_at_once(index: TopicIndex, group: Group, *, now_ms: int, count_max: int) -> bool:
    """Returns whether choosing reads no footer and creates no dead letters, which may fill a segment."""
    if group.paused:
        return True
    again, deaths = group.visible_again(now_ms=now_ms, count_max=count_max)
    return not deaths and all(index.is_in_memory(first) for first in (group.position, *(retry[0] for retry in again)))


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def _first_of(ranges: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Returns the ranges cut to their first `count` sequences."""
    kept: list[tuple[int, int]] = []
    for first, end in ranges:
        if count <= 0:
            break
        kept.append((first, min(end, first + count)))
        count -= end - first
    return kept


def _is_wanted(group: Group, sequence: int, record: Record) -> bool:
    """Returns whether a message passes the group's filter; a message below the position passed an earlier one."""
    return group.accepts is None or sequence < group.position or group.accepts(record.headers)


def body_bytes(records: Iterable[Found]) -> int:
    """Returns the bytes of bodies."""
    return sum([0 if record is None else len(record.body) for _, record in records])


def first_within(records: list[Found], *, bytes_max: int) -> list[Found]:
    """Returns the first records up to `bytes_max` of bodies; the one that exceeds it is the last."""
    if body_bytes(records) <= bytes_max:
        return records
    total = 0
    for index, (_, record) in enumerate(records):
        total += 0 if record is None else len(record.body)
        if total > bytes_max:
            return records[: index + 1]
    return records


def _still_there(group: Group, choice: PullChoice, records: Sequence[Found]) -> Sequence[Found]:
    """Returns the records that are still deliverable: others may have been settled or moved while they were read."""
    gone: list[tuple[int, int]] = []
    for first, end in choice.wanted:
        if (first, end) == choice.fresh:
            is_there = group.position == first
        else:
            is_there = group.is_visible(first, end, now_ms=choice.now_ms) or group.is_filed(first, end)
        if not is_there:
            gone.append((first, end))
    if not gone:
        return records
    if group.order is not None:
        return []  # the next message of a key may be among those that are gone: retry
    return [entry for entry in records if not any(first <= entry[0] < end for first, end in gone)]


def _runs_of(
    records: Sequence[tuple[int, Record]],
) -> list[tuple[int, list[Record]]]:
    """Groups records with consecutive sequences: (first sequence, records)."""
    if records and [sequence for sequence, _ in records] == list(range(records[0][0], records[0][0] + len(records))):
        return [(records[0][0], [record for _, record in records])]
    runs: list[tuple[int, list[Record]]] = []
    following = -1
    for sequence, record in records:
        if sequence == following:
            runs[-1][1].append(record)
        else:
            runs.append((sequence, [record]))
        following = sequence + 1
    return runs


def check_within(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidMessage, which names the bounds, if a value is out of them."""
    if not low <= value <= high:
        raise InvalidMessage(f"{name} must be from {low:,} to {high:,}, not {value:,}")
