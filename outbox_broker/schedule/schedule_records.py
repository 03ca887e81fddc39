"""Records of the schedule's log: changes of its state, written to the log, then applied by the code that replays it.

A checkpoint is the whole state except for the messages in buckets; then come changes, in order. Messages may arrive in
another log, of which a checkpoint has the place: then a change says by their arrival numbers which ones it is about,
and its counts by topic leave them out, since one of them may be lost with the end of that log.
A record is a MessagePack array whose first element is its tag; new fields go last and have defaults.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outbox_broker.common.cancel_topic_patterns import Scope
from outbox_broker.schedule.recent_cancels import Cancel
from outbox_broker.schedule.sorted_run import Entry, SortedRun

Part = tuple[int, int, int]
"""A part of a dispatched batch: (run id, from, up to), or (0, seq, 0) for a message that was in memory."""
FROM_MEMORY: Final = 0


class Scheduled(msgspec.Struct, array_like=True, frozen=True, tag="scheduled"):
    """Messages arrived. Those in `dead`, of which `dead_topics` has the topic of each, were canceled before they did,
    and go nowhere. A record of the log only if messages arrive in it.
    """

    entries: list[Entry]
    dead: list[str]
    dead_topics: list[str]


class ScheduleCanceled(msgspec.Struct, array_like=True, frozen=True, tag="canceled"):
    """Ids were canceled: `stopped` were scheduled (in memory, as `arrivals`, or at `marks`: run id, index), `early` are
    to come.

    `stopped_topics`: the topic of each of the stopped; `topics`: how many of the marked ones each has; `scope`:
    patterns of the topics that the cancel is good for (None: all).
    """

    at_ms: int
    stopped: list[str]
    early: list[str]
    marks: list[tuple[int, int]]
    topics: dict[str, int]
    stopped_topics: list[str]
    scope: Scope = None
    arrivals: list[int] = []


class BatchHanded(msgspec.Struct, array_like=True, frozen=True, tag="handed"):
    """A batch is about to be handed out: from here on it will be delivered, and a cancel is too late. `topics`: how
    many of each are from runs.
    """

    batch: int
    parts: list[Part]
    topics: dict[str, int]


class BatchFired(msgspec.Struct, array_like=True, frozen=True, tag="fired"):
    """A batch was delivered, except for the messages that are scheduled `again`, under later due times."""

    batch: int
    again: list[Entry] = []


class BatchFiredInPart(msgspec.Struct, array_like=True, frozen=True, tag="fired_in_part"):
    """The messages of a batch that arrived as `done` were delivered, except for those of them that are scheduled
    `again`. The others are unsettled still, under their own numbers: new ones would put them behind their millisecond.
    """

    batch: int
    done: list[int]
    again: list[Entry] = []


class BucketChanged(msgspec.Struct, array_like=True, frozen=True, tag="bucket"):
    """A bucket's state (levels.BucketState) changed. A bucket that is done is removed."""

    level: int
    slot: int
    state: str


class RunsAdded(msgspec.Struct, array_like=True, frozen=True):
    """Runs appended to a bucket's segment, which is new, or its last one. The bucket is created if it is new."""

    level: int
    slot: int
    segment: str
    end: int
    runs: list[SortedRun]


class Moved(msgspec.Struct, array_like=True, frozen=True, tag="moved"):
    """Messages were re-filed: `taken` is the index reached in each run of the parent, `added` the new locations.

    `gone` (run id, index) are those among them that were canceled while they were written.
    """

    level: int
    slot: int
    taken: list[tuple[int, int]]
    added: list[RunsAdded]
    gone: list[tuple[int, int]] = []


class SegmentsMerged(msgspec.Struct, array_like=True, frozen=True, tag="merged"):
    """The messages of some of a bucket's segments were written again, to one: `runs` and `segments` are gone from it.

    `gone` (run id, index) are those among them that were canceled while they were written.
    """

    level: int
    slot: int
    runs: list[int]
    segments: list[str]
    added: list[RunsAdded]
    gone: list[tuple[int, int]] = []


class Quarantined(msgspec.Struct, array_like=True, frozen=True, tag="quarantined"):
    """Messages of a run do not match their checksum: they are never dispatched, and its segment is kept for the
    operator.

    `lost` are their indexes; None: none of the remaining ones is readable. `topics`: how many of each were still to be
    dispatched.
    """

    run: int
    lost: list[int] | None = None
    topics: dict[str, int] = {}


class StoredBucket(msgspec.Struct, array_like=True, frozen=True):
    """A bucket in a checkpoint, with its segments and the end of each, in order."""

    level: int
    slot: int
    segments: dict[str, int]
    state: str
    runs: list[SortedRun]
    quarantined: list[int]


class StoredIndex(msgspec.Struct, array_like=True, frozen=True):
    """A sorted piece of the id index: its segment, how many entries it has, and where its fences are."""

    segment: str
    count: int
    fences_position: int
    fences_bytes: int


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """Messages in memory that arrived before `before_seq` are now in buckets, and in a new piece of the id index.

    `gone` (run id, index) are those dispatched or canceled while it was written; `fired` those that were dispatched.
    `topics`: how many of each topic wait in these buckets; a replay may not find all of them where they arrived.
    """

    added: list[RunsAdded]
    index: StoredIndex | None
    before_seq: int
    gone: list[tuple[int, int]]
    fired: list[tuple[int, int]] = []
    topics: dict[str, int] = {}


class StoredHandOut(msgspec.Struct, array_like=True, frozen=True):
    """A dispatched and unsettled batch, with those of its messages that were in memory; `done` are settled already."""

    batch: int
    parts: list[Part]
    entries: list[Entry]
    done: list[int] = []


class Passed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that was dispatched before it was in a bucket."""

    due_ms: int
    seq: int
    id: str
    topic: str


class ScheduleCheckpoint(msgspec.Struct, array_like=True, frozen=True, tag="checkpoint", kw_only=True):
    """The state at an offset of the log; `arrived_to`: where messages that arrived later begin in their log, if that is
    another one.
    """

    next_seq: int
    next_run: int
    next_batch: int
    buckets: list[StoredBucket]
    index: list[StoredIndex]
    hand_outs: list[StoredHandOut]
    topics: dict[str, int]
    pending: list[Entry]
    cancels: list[Cancel] = []
    fired: list[Passed] = []
    arrived_to: int


LogRecord = (
    ScheduleCheckpoint
    | Scheduled
    | ScheduleCanceled
    | BatchHanded
    | BatchFired
    | BatchFiredInPart
    | Flushed
    | BucketChanged
    | Moved
    | SegmentsMerged
    | Quarantined
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(LogRecord).decode


def arrivals_before(record: LogRecord) -> int:
    """Returns a number above those of all arrivals that a record names: it was written after they came."""
    match record:
        case BatchHanded():
            return 1 + max((seq for run_id, seq, _ in record.parts if run_id == FROM_MEMORY), default=-1)
        case ScheduleCanceled():
            return 1 + max(record.arrivals, default=-1)
        case Flushed():
            return record.before_seq
        case _:
            return 0
