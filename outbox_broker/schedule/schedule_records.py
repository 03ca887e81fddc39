"""What the schedule's log says: each change of its state, as a record. Written down, then done by what replays it.

A log segment begins with a Checkpoint, the whole state but for the messages in buckets; then come changes, in order.
A record is a MessagePack array whose first element is its tag; new fields go last and have defaults.
"""

from __future__ import annotations

from typing import Final

import msgspec

from outbox_broker.common.cancel_scope import Scope
from outbox_broker.schedule.recent_cancels import Cancel
from outbox_broker.schedule.sorted_run import Entry, SortedRun

Part = tuple[int, int, int]
"""A piece of a hand-out: (run id, from, up to), or (0, seq, 0) for a message that was in memory."""
FROM_MEMORY: Final = 0


class Scheduled(msgspec.Struct, array_like=True, frozen=True, tag="scheduled"):
    """Messages came. Those in `dead` were canceled before they came, and go nowhere."""

    entries: list[Entry]
    dead: list[str]
    dead_topics: list[str] = []  # of each of those; none of them by an earlier version: any


class ScheduleCanceled(msgspec.Struct, array_like=True, frozen=True, tag="canceled"):
    """Ids were canceled: `stopped` were scheduled (in memory, or at `marks`: run id, index), `early` are to come.

    `stopped_topics`: the topic of each of the stopped (none by an earlier version: any); `scope`: patterns of the
    topics that the cancel is good for (None: all).
    """

    at_ms: int
    stopped: list[str]
    early: list[str]
    marks: list[tuple[int, int]]
    topics: dict[str, int]
    stopped_topics: list[str] = []
    scope: Scope = None


class BatchHanded(msgspec.Struct, array_like=True, frozen=True, tag="handed"):
    """A batch is about to be handed out: from here on it will be delivered, and a cancel is too late.

    `ids` were those of what was in memory, which `parts` say as well; they are not written any more.
    """

    batch: int
    parts: list[Part]
    ids: list[str]
    topics: dict[str, int]


class BatchFired(msgspec.Struct, array_like=True, frozen=True, tag="fired"):
    """A batch was delivered, but for those of it that are scheduled `again`, under later due times."""

    batch: int
    again: list[Entry] = []


class BucketChanged(msgspec.Struct, array_like=True, frozen=True, tag="bucket"):
    """A bucket's state (levels.BucketState) changed. One that is done is gone."""

    level: int
    slot: int
    state: str


class RunsAdded(msgspec.Struct, array_like=True, frozen=True):
    """Runs at the end of a bucket's segment, which is made where it is new."""

    level: int
    slot: int
    segment: str
    end: int
    runs: list[SortedRun]


class Moved(msgspec.Struct, array_like=True, frozen=True, tag="moved"):
    """Messages were re-filed: `taken` is how far each run of the parent got, `added` where they are now.

    `gone` (run id, index) are those among them that were canceled while they were written.
    """

    level: int
    slot: int
    taken: list[tuple[int, int]]
    added: list[RunsAdded]
    gone: list[tuple[int, int]] = []


class Quarantined(msgspec.Struct, array_like=True, frozen=True, tag="quarantined"):
    """Messages of a run do not match their checksum: they are never served, and its segment is kept for the operator.

    `lost` are their indexes; None: none of those that are left can be read. `topics`: how many of each were to come.
    """

    run: int
    lost: list[int] | None = None
    topics: dict[str, int] = {}


class StoredBucket(msgspec.Struct, array_like=True, frozen=True):
    """A bucket in a checkpoint."""

    level: int
    slot: int
    segment: str
    state: str
    end: int
    runs: list[SortedRun]
    quarantined: list[int]


class StoredIndex(msgspec.Struct, array_like=True, frozen=True):
    """A sorted piece of the id index: its segment, where its fences are, and the size of an entry: in those of 24 bytes
    the topic is missing.
    """

    segment: str
    count: int
    fences_position: int
    fences_bytes: int
    entry_bytes: int = 24


class Flushed(msgspec.Struct, array_like=True, frozen=True, tag="flushed"):
    """What was in memory and came before `before_seq` stands in buckets now, and in a new piece of the id index.

    `gone` (run id, index) are those among it that fired or were canceled while it was written; `fired` those
    that fired.
    """

    added: list[RunsAdded]
    index: StoredIndex | None
    before_seq: int
    gone: list[tuple[int, int]]
    fired: list[tuple[int, int]] = []


class StoredHandOut(msgspec.Struct, array_like=True, frozen=True):
    """A batch that was handed out and not settled, with those of its messages that were in memory."""

    batch: int
    parts: list[Part]
    entries: list[Entry]


class Passed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that fired before it was in a bucket."""

    due_ms: int
    seq: int
    id: str
    topic: str


class ScheduleCheckpoint(msgspec.Struct, array_like=True, frozen=True, tag="checkpoint", kw_only=True):
    """The state when a log segment begins. `canceled` and `passed` are of earlier versions, which noted no topics."""

    next_seq: int
    next_run: int
    next_batch: int
    buckets: list[StoredBucket]
    index: list[StoredIndex]
    hand_outs: list[StoredHandOut]
    canceled: list[tuple[str, int, bool]]
    topics: dict[str, int]
    pending: list[Entry]
    passed: dict[str, tuple[int, int]]
    cancels: list[Cancel] = []
    fired: list[Passed] = []


LogRecord = (
    ScheduleCheckpoint
    | Scheduled
    | ScheduleCanceled
    | BatchHanded
    | BatchFired
    | Flushed
    | BucketChanged
    | Moved
    | Quarantined
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(LogRecord).decode
