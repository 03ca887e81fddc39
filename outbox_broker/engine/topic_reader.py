"""Broadcast reads: a topic's messages for readers that track their own position. No group; readers leave no state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from outbox_broker.engine.context import EngineContext
from outbox_broker.engine.dispatcher import Dispatcher
from outbox_broker.engine.footer_repair import FooterRepair
from outbox_broker.engine.group_registry import GroupRegistry
from outbox_broker.engine.puller import Puller, check_within, first_within
from outbox_broker.journal.message_reader import Found, read_runs
from outbox_broker.log.topic_index import PlaceRun
from outbox_core.messages.broadcast_port import Start, TopicRead, check_start
from outbox_core.messages.limits import PULL_MESSAGES_MAX, PULL_WAIT_MS_MAX
from outbox_core.messages.message import Record, check_topic
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

READERS: Final = ""
"""Replaces a group's name for waiting readers: no group can have it."""


class TopicReader:
    """Reads without deliveries."""

    def __init__(
        self, context: EngineContext, groups: GroupRegistry, footer_repair: FooterRepair, dispatcher: Dispatcher,
        puller: Puller,
    ) -> None:  # fmt: skip
        self._context = context
        self._clock = context.clock
        self._options = context.options
        self._lock = context.lock
        self._state = context.state
        self._groups = groups
        self._footer_repair = footer_repair
        self._dispatcher = dispatcher
        self._puller = puller

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Returns the messages of a topic from `offset`, or from its `start`, waiting up to `wait_ms` for the first."""
        check_within("max_messages", max_messages, 1, PULL_MESSAGES_MAX)
        check_within("wait_ms", wait_ms, 0, PULL_WAIT_MS_MAX)
        start_offset = self.place_to_read(topic, start=start) if offset is None else offset
        deadline_ms = self._clock.monotonic_ms() + wait_ms

        def poll() -> TopicRead | None:
            read = self.read_on(topic, start_offset, max_messages=max_messages)
            return None if read.next_offset == start_offset else read

        if not wait_ms and self._dispatcher.may_be_dispatching():
            self._dispatcher.dispatch_unless_disk_is_full()
        nothing = TopicRead(messages=[], offset=start_offset, next_offset=start_offset)
        return poll() or self._puller.awaited(topic, READERS, poll, deadline_ms=deadline_ms) or nothing

    def place_to_read(self, topic: str, *, start: Start) -> int:
        """Returns where a reader without an offset begins."""
        check_topic(topic)
        check_start(start)
        if start == "latest":
            self._context.messages.commit()  # messages being synced were published before this read
        with self._lock:
            known_topic = self._state.topics.get(topic)
            if known_topic is None:
                return 0
            return self._groups.durable_end(known_topic) if start == "latest" else known_topic.index.start

    def read_on(self, topic: str, offset: int, *, max_messages: int, bytes_max: int | None = None) -> TopicRead:
        """Returns the durable messages from `offset` on; waits for no message. One message may exceed `bytes_max`."""
        check_topic(topic)
        first, end, runs = self._footer_repair.looked_up(partial(self._stretch, topic, offset, count_max=max_messages))
        if not runs:
            return TopicRead(messages=[], offset=first, next_offset=end)
        bytes_max = min(bytes_max or self._options.pull_bytes_max, self._options.pull_bytes_max)
        records = first_within(
            read_runs(self._context.messages, runs, first=first, end=end, bytes_max=bytes_max), bytes_max=bytes_max
        )
        return self._read_of(topic, records, offset=first)

    def _stretch(self, topic: str, offset: int, *, count_max: int) -> tuple[int, int, list[PlaceRun]]:
        """Returns the range of durable sequences from an offset on, and the runs that contain it.

        It ends before the offset if the topic does.
        """
        self._context.refuse_if_closed()
        known_topic = self._state.topics.get(topic)
        end = self._state.end_of(topic) if known_topic is None else self._groups.durable_end(known_topic)
        if known_topic is None or offset > end:
            return offset, min(offset, end), []
        first = max(offset, known_topic.index.start)
        end = known_topic.index.visible_end(first, count_max=count_max, durable_end=self._context.messages.committed)
        return first, end, list(known_topic.index.runs(first, end))

    def _read_of(self, topic: str, records: Sequence[Found], *, offset: int) -> TopicRead:
        """Returns the messages up to the first that is early, because the wall clock stepped back since it was due."""
        now_ms = self._clock.now_ms()
        with self._lock:
            known_topic = self._state.topics.get(topic)
            start = self._state.end_of(topic) if known_topic is None else known_topic.index.start
        messages: list[Record] = []
        next_offset = offset
        for sequence, record in records:
            if record is None and sequence < start:
                pass  # it was dropped, or its topic deleted, while it was read
            elif record is None:
                logger.error("record_skipped", extra={"topic": topic, "sequence": sequence, "cause": "damaged"})
            elif (record.deliver_at_ms or 0) > now_ms:
                break
            else:
                messages.append(record)
            next_offset = sequence + 1
        with self._lock:
            self._state.counters["broadcast", topic, ""] += len(messages)
        return TopicRead(messages=messages, offset=offset, next_offset=next_offset)
