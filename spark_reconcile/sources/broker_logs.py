"""The broker's logs: surveys their segments, and converts the records to rows. Without Spark, but for `named_runs`.

The only module that knows the format of the logs. It relies only on outbox_core.journal: its blocks (checksums, torn
tails, damage) for the actions, its frames for the messages, and the records MessageRecord and Action. An unknown kind
of record is an error, not skipped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from outbox_core.common.errors import ConfigurationError
from outbox_core.common.rate_limit import RateLimit
from outbox_core.journal import journal
from outbox_core.journal.block import (
    SEGMENT_HEAD_BYTES,
    Block,
    Frame,
    FrameKind,
    SegmentHead,
    SegmentKind,
    SegmentRefused,
    changes_of,
    decode_segment_head,
    scan,
)
from outbox_core.journal.dead_letter_records import Discarded
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic, PurgedTopic
from outbox_core.messages.message import DUE_HEADER
from spark_reconcile.core.errors import NotComparable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DELIVERY_KINDS: Final = ("delivered", "extended", "requeued", "acked", "died", "redriven", "discarded")
"""Actions on a message that was delivered to a group: it was durable before."""
STEP_BACK_MS: Final = 3_600_000
"""Limit of a step back of the broker's clock from one segment to the next, up to which the headers of neighbours bound
a segment's times.
"""


BLOCK_LOGS: Final = {"actions": SegmentKind.ACTIONS}
"""The logs that are written in blocks (outbox_core.journal.block), and the kind of their segments."""
ACTION_KINDS: Final = frozenset({FrameKind.CHANGE})
"""The kind of the frames that are actions."""
CHECKPOINT_KINDS: Final = frozenset({FrameKind.CHECKPOINT})
"""The kind of the frames that are parts of a checkpoint, between the actions."""
_KINDS: Final = frozenset(FrameKind)
_SEGMENT: Final = re.compile(r"[a-z]+-(\d{12})\.segment")
_NOTE_SUFFIX: Final = ".proven"
"""Of the broker's notes on how far a segment is known to be durable."""
_EARLIER_SUFFIX: Final = ".log"


class LogSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment file at the time of the survey: what was appended later is not read."""

    path: str
    first_offset: int
    created_at_ms: int
    size_bytes: int
    """Of the file, up to where the next segment begins: bytes behind that are of an append that failed."""
    last: bool
    changed_ns: int = 0
    """The modification time of the file: a folder restored from a copy has other files of the same names."""
    known_bytes: int = 0
    """Records, or blocks of them, that end within so many bytes were read before, and are skipped."""

    @property
    def has_blocks(self) -> bool:
        """Whether it is one of blocks."""
        return _SEGMENT.fullmatch(Path(self.path).name) is not None

    @property
    def head_bytes(self) -> int:
        """The length of what is before the first record, and counts for no offset."""
        return SEGMENT_HEAD_BYTES if self.has_blocks else journal.HEADER_BYTES


def survey(folder: Path, log: str) -> list[LogSegment]:
    """Lists the segments of `messages` or `actions`, oldest first, and their sizes. Reads only headers.

    Raises ConfigurationError if this is no broker's data folder, and NotComparable if a segment is missing in the
    middle, truncated or damaged in its header.
    """
    kind = BLOCK_LOGS.get(log)
    segments = _with_records(folder / log) if kind is None else _with_blocks(folder / log, log, kind)
    if not segments:
        raise ConfigurationError(
            f"{folder} is not a broker's data folder: it has no segments in {log}/; name the folder that was given to "
            "`outbox broker serve --data`"
        )
    return segments


def _with_records(folder: Path) -> list[LogSegment]:
    """Lists the segments of a log of records."""
    paths = journal.segment_paths(folder)
    segments = [_segment(path, last=index == len(paths) - 1) for index, path in enumerate(paths)]
    for segment, following in pairwise(segments):
        if segment.first_offset + segment.size_bytes - journal.HEADER_BYTES != following.first_offset:
            raise NotComparable(
                f"the broker's log has a hole between {segment.path} and {following.path}; restore the missing segment"
            )
    return segments


def _with_blocks(folder: Path, log: str, kind: SegmentKind) -> list[LogSegment]:
    """Lists the segments of a log of blocks. The newest is left out until it has its head."""
    # The notes first: one is made behind its segment, and removed before it.
    notes = sorted(path.stem for path in folder.glob(f"{log}-*{_NOTE_SUFFIX}"))
    paths = sorted(path for path in folder.glob(f"{log}-*") if _SEGMENT.fullmatch(path.name))
    if notes and notes[-1] > (paths[-1].stem if paths else ""):
        raise NotComparable(
            f"{notes[-1]} is missing in {folder}, the newest segment of the broker's log, of which there is a note: "
            "restore it from a copy"
        )
    if not paths and (earlier := sorted(folder.glob(f"*{_EARLIER_SUFFIX}"))):
        raise ConfigurationError(
            f"{folder} holds segments of an earlier format ({earlier[0].name}): reconcile it with the version that "
            "wrote it"
        )
    segments: list[LogSegment] = []
    try:
        if paths and _is_unfinished(paths[-1]):
            if len(paths) == 1:  # the broker is making its first segment
                return [LogSegment(path=str(paths[0]), first_offset=0, created_at_ms=0, size_bytes=0, last=True)]
            paths.pop()
        for path in paths:
            head, stat = _head_of(path, kind), path.stat()
            segments.append(
                LogSegment(
                    path=str(path), first_offset=head.first, created_at_ms=head.created_at_ms,
                    size_bytes=stat.st_size, last=path == paths[-1], changed_ns=stat.st_mtime_ns,
                )
            )  # fmt: skip
    except OSError as error:
        raise NotComparable(f"cannot read the broker's segment {error.filename}: {error.strerror}") from error
    return [*(_ended(segment, following) for segment, following in pairwise(segments)), *segments[-1:]]


def _is_unfinished(path: Path) -> bool:
    """Returns whether a file is a segment that is being made, or was when the machine lost power."""
    with path.open("rb") as file:
        head = file.read(SEGMENT_HEAD_BYTES)
        return len(head) < SEGMENT_HEAD_BYTES or not (any(head) or file.read().strip(b"\0"))


def _head_of(path: Path, kind: SegmentKind) -> SegmentHead:
    with path.open("rb") as file:
        data = file.read(SEGMENT_HEAD_BYTES)
    try:
        head = decode_segment_head(data)
    except SegmentRefused as refused:
        raise NotComparable(f"the broker's segment {path} cannot be read: {refused}") from refused
    if head.kind is not kind:
        raise NotComparable(f"the broker's segment {path} is one of another log; restore it from a copy")
    return head


def _ended(segment: LogSegment, following: LogSegment) -> LogSegment:
    """Returns a segment that ends where the next one begins. Raises NotComparable if it ends before."""
    numbers = [_SEGMENT.fullmatch(Path(one.path).name) for one in (segment, following)]
    before, number = (0 if match is None else int(match[1]) for match in numbers)
    size_bytes = SEGMENT_HEAD_BYTES + following.first_offset - segment.first_offset
    if number != before + 1 or not SEGMENT_HEAD_BYTES <= size_bytes <= segment.size_bytes:
        # The broker begins a segment before the one before it is on the disk, and removes it where that ends early.
        power = "; where its machine lost power, start the broker" if following.last else ""
        raise NotComparable(
            f"the broker's log has a hole between {segment.path} and {following.path}; restore the missing "
            f"segment{power}"
        )
    return msgspec.structs.replace(segment, size_bytes=size_bytes)


def grown(before: list[LogSegment], now: list[LogSegment], *, end_offset: int | None = None) -> list[LogSegment]:
    """Returns what was appended between two surveys. `end_offset`: where its last whole record ended at the first;
    by default, where its last file did.
    """
    known = {segment.path: segment.size_bytes for segment in before}
    if end_offset is not None:
        # Behind it was a torn tail, in whose place a broker that was started since may have written something else.
        last = before[-1]
        known[last.path] = last.head_bytes + end_offset - last.first_offset
    return [
        msgspec.structs.replace(segment, known_bytes=known.get(segment.path, 0))
        for segment in now
        if segment.size_bytes > known.get(segment.path, 0)
    ]


def reach_ms(segments: list[LogSegment]) -> int:
    """Returns since when a log is complete: 0 if none of it was dropped."""
    return 0 if begins_whole(segments) else segments[0].created_at_ms


def begins_whole(segments: Sequence[LogSegment]) -> bool:
    """Whether a log has its first segment: nothing of it was dropped."""
    return segments[0].first_offset == 0


def _segment(path: Path, *, last: bool) -> LogSegment:
    try:
        with path.open("rb") as file:
            head = file.read(journal.HEADER_BYTES)
        stat = path.stat()
        if last and len(head) < journal.HEADER_BYTES:
            return LogSegment(path=str(path), first_offset=int(path.stem), created_at_ms=0, size_bytes=0, last=True)
        header = journal.SegmentHeader.decode(head)
    except OSError as error:
        raise NotComparable(f"cannot read the broker's segment {path}: {error.strerror}") from error
    except journal.SegmentDamaged as damage:
        raise NotComparable(f"the broker's segment {path} is damaged: {damage}; restore it from a copy") from damage
    return LogSegment(
        path=str(path),
        first_offset=header.first_offset,
        created_at_ms=header.created_at_ms,
        size_bytes=stat.st_size,
        last=last,
        changed_ns=stat.st_mtime_ns,
    )


MESSAGE_SCHEMA: Final = (
    "id string, topic string, message_key string, sequence bigint, body_sha256 string, created_ms bigint, "
    "stored_ms bigint, deliver_at_ms bigint, damage string"
)
HEADER_SCHEMA: Final = MESSAGE_SCHEMA.replace("damage", "headers binary, damage")
"""A stored message with its headers, a map in MessagePack; the marker of a scheduled message has none."""
ACTION_SCHEMA: Final = (
    "kind string, topic string, consumer_group string, id string, sequence bigint, position bigint, at_ms bigint, "
    "visible_at_ms bigint, attempt bigint, reason string, damage string"
)
"""An action on one message, or on a whole group."""
RUN_SCHEMA: Final = ACTION_SCHEMA.replace("damage", "messages bigint, damage")
"""An action as it is written: if `messages` is not null, on so many messages from `sequence` on, and `id` is null."""
DUE_DIGITS_MAX: Final = 15
SCHEMAS: Final = {"messages": MESSAGE_SCHEMA, "actions": RUN_SCHEMA}

Row = tuple[Any, ...]


def data_of(segment: LogSegment) -> bytes:
    """Returns a segment's bytes up to its surveyed size, with a checked header; none if it was being created."""
    with Path(segment.path).open("rb") as file:
        data = file.read(segment.size_bytes)
    if segment.last and len(data) < journal.HEADER_BYTES:
        return b""
    journal.SegmentHeader.decode(data[: journal.HEADER_BYTES])
    return data


def frames_behind(segment: LogSegment, data: bytes, start: int) -> Iterator[journal.Frame]:
    """Yields the frames from the byte `start` of the segment's file on, except those that were read before."""
    shift = segment.first_offset - journal.HEADER_BYTES
    end = start
    for frame in journal.read_frames(memoryview(data)[start:], first_offset=start + shift):
        end = frame.end - shift
        if end > segment.known_bytes:
            yield frame
    missing = segment.size_bytes - end
    if missing and not segment.last:
        raise journal.SegmentDamaged(f"its last {missing} bytes are no whole record, and it is not the last segment")


class LoggedBlock(NamedTuple):
    """A block of a log, from the offset `offset` to `end`, with each change of state once.

    `kind` and `stored_ms` (when it was stored) are None where its head is damaged, and nothing else tells. `is_lost`:
    a frame that is wanted may be lost, with its copy if it has one.
    """

    kind: int | None
    stored_ms: int | None
    frames: list[Frame]
    offset: int
    end: int
    is_lost: bool


class LoggedFrame(NamedTuple):
    """A frame of a log. `position` is unique in its log, and grows: the offset of its block, and its number there."""

    kind: int
    number: int
    payload: bytes
    position: int


def blocks_of(segment: LogSegment, *, wanted: Container[int]) -> Iterator[LoggedBlock]:
    """Yields the blocks of a segment, except those that were read before; in the last one, up to a torn tail.

    `wanted`: the kinds of blocks whose frames are read; others may have none. Raises SegmentDamaged if the segment ends
    too early, SegmentRefused at what a newer version wrote, and OSError.
    """
    with Path(segment.path).open("rb") as file:
        file.seek(SEGMENT_HEAD_BYTES)
        data = file.read(max(0, segment.size_bytes - SEGMENT_HEAD_BYTES))
    first, end = segment.first_offset, 0
    proven = 0 if segment.last else first + segment.size_bytes - SEGMENT_HEAD_BYTES
    # As if the machine had not been started anew: only the last append can be cut short then, and all else that is not
    # whole is told as damage. The broker may cut it away at its next start; here nothing may be passed over silently.
    for found in scan(data, first=first, proven=proven, same_boot=True, wanted=wanted):
        end = found.end
        if SEGMENT_HEAD_BYTES + end > segment.known_bytes:
            yield _logged(found, first, wanted)
    missing = segment.size_bytes - SEGMENT_HEAD_BYTES - end
    if missing > 0 and not segment.last:
        raise journal.SegmentDamaged(f"its last {missing} bytes are missing, and it is not the last segment")


def _logged(found: Block, first: int, wanted: Container[int]) -> LoggedBlock:
    changes = changes_of(found.frames)
    others = [frame for frame in found.frames if frame.kind != FrameKind.CHANGE]
    copies_lost = 2 * len(changes) - (len(found.frames) - len(others))
    # Without the head, the kind is that of the first whole frame, and the damaged ones may be of another kind.
    is_wanted = found.at_ms is None or found.kind in wanted
    return LoggedBlock(
        kind=found.kind, stored_ms=found.at_ms, offset=first + found.position, end=first + found.end,
        frames=[*(Frame(FrameKind.CHANGE, number, changes[number]) for number in sorted(changes)), *others],
        is_lost=found.damaged is None or (is_wanted and found.damaged > copies_lost),
    )  # fmt: skip


def frames_of(segment: LogSegment, *, wanted: Container[int]) -> Iterator[LoggedFrame]:
    """Yields the frames of the wanted kinds, each change of state once. Raises as blocks_of() does, and SegmentDamaged
    at a block of which one is lost.
    """
    for block in blocks_of(segment, wanted=wanted):
        if block.kind is not None and block.kind not in _KINDS:
            raise journal.SegmentDamaged(f"a block of the unknown kind {block.kind:#x} at offset {block.offset}")
        if block.is_lost:
            raise journal.SegmentDamaged(f"damaged block at offset {block.offset}")
        for index, frame in enumerate(block.frames):
            if frame.kind in wanted:
                yield LoggedFrame(*frame, position=block.offset + index)


def message_rows(frame: journal.Frame) -> Iterator[Row]:
    """Yields a stored message as a row of MESSAGE_SCHEMA; `stored_ms` is null for the copy written when it fell due."""
    yield (*_message(journal.decode_message(frame.payload)), None)


def header_rows(frame: journal.Frame) -> Iterator[Row]:
    """Yields a stored message as a row of HEADER_SCHEMA."""
    record = journal.decode_message(frame.payload)
    yield (*_message(record), msgspec.msgpack.encode(record.headers), None)


def _message(record: journal.MessageRecord) -> Row:
    # A scheduled message's marker, which may be dropped by now, has the time it was stored; the copy, when it fell due.
    stored_ms = None if record.copy == journal.FIRED_COPY else record.stored_at_ms
    is_note = record.copy == journal.SCHEDULED
    deliver_at_ms = asked_due_ms(record.headers) if record.deliver_at_ms is None else record.deliver_at_ms
    body_sha256 = record.body.hex() if is_note else hashlib.sha256(record.body).hexdigest()
    return (
        record.id, record.topic, record.key, record.sequence, body_sha256, record.created_at_ms, stored_ms,
        deliver_at_ms,
    )  # fmt: skip


def asked_due_ms(headers: Mapping[str, str]) -> int | None:
    """Returns the due time that the message was published with, if a delay service has passed it on when it was due."""
    value = headers.get(DUE_HEADER, "")
    return int(value) if len(value) <= DUE_DIGITS_MAX and value.isascii() and value.isdigit() else None


def action_rows(frame: LoggedFrame) -> Iterator[Row]:  # noqa: C901 - one arm an action, no logic
    """Yields an action as rows of RUN_SCHEMA: one for each run of its messages, or one for a whole group."""
    at = frame.position
    match journal.decode_action(frame.payload):
        case journal.Handed(topic=topic, group=group, at_ms=at_ms, visible_at_ms=visible, runs=delivered):
            for run in delivered:
                yield _row("delivered", topic, group, (run.first, None, run.count), at, at_ms, visible, run.attempt)
        case journal.Settled(topic=topic, group=group, at_ms=at_ms, runs=settled):
            for first, count in settled:
                yield _row("acked", topic, group, (first, None, count), at, at_ms)
        case journal.Fired(topic=topic, at_ms=at_ms, entries=dispatched):
            for sequence, id_ in dispatched:
                yield _row("fired", topic, None, (sequence, id_, None), at, at_ms)
        case journal.Canceled() as canceled:
            yield from _canceled_rows(canceled, at)
        case journal.Requeued(topic=topic, group=group, at_ms=at_ms, entries=requeued, reason=reason):
            for first, count, visible, used in requeued:
                yield _row("requeued", topic, group, (first, None, count), at, at_ms, visible, used, reason)
        case journal.Extended(topic=topic, group=group, at_ms=at_ms, visible_at_ms=visible, entries=entries):
            for first, count in entries:
                yield _row("extended", topic, group, (first, None, count), at, at_ms, visible)
        case journal.Died(topic=topic, group=group, at_ms=at_ms, entries=died, reason=reason):
            for first, count, attempts in died:
                yield _row("died", topic, group, (first, None, count), at, at_ms, None, attempts, reason)
        case journal.Redriven(topic=topic, group=group, at_ms=at_ms, entries=entries, per_second=rate, pace=before):
            for message_run, visible in _paced(entries, RateLimit(*before), at_ms=at_ms, per_second=rate):
                yield _row("redriven", topic, group, message_run, at, at_ms, visible)
        case Discarded(topic=topic, group=group, at_ms=at_ms, entries=entries, why=why):
            for first, count in entries:
                yield _row("discarded", topic, group, (first, None, count), at, at_ms, None, None, why)
        case journal.Declared(topic=topic, group=group, at_ms=at_ms, position=position, settings=settings):
            filter_text = settings.get("filter") or None  # the column `reason` has the filter here
            yield _row("declared", topic, group, (position, None, None), at, at_ms, None, None, filter_text)
        case DeletedGroup(topic=topic, group=group, at_ms=at_ms):
            yield _row("deleted", topic, group, (None, None, None), at, at_ms)
        case DeletedTopic(topic=topic, at_ms=at_ms, groups=groups):
            yield from (_row("deleted", topic, group, (None, None, None), at, at_ms) for group in groups)
        case PurgedTopic(topic=topic, at_ms=at_ms, end=end, groups=purged):
            yield from (_row("sought", topic, group, (end, None, None), at, at_ms) for group, _ in purged)
        case journal.Sought() | journal.Dropped() as moved:
            kind = "sought" if isinstance(moved, journal.Sought) else "dropped"
            yield _row(kind, moved.topic, moved.group, (moved.position, None, None), at, moved.at_ms)
        case journal.Paused(topic=topic, group=group, at_ms=at_ms, paused=paused):
            yield _row("paused" if paused else "resumed", topic, group, (None, None, None), at, at_ms)


def _canceled_rows(canceled: journal.Canceled, at: int) -> Iterator[Row]:
    """Yields a row for each id; the column `reason` has the cancel's topics."""
    for id_, topic in zip(canceled.ids, canceled.topics, strict=True):
        within = _expression((topic,) if topic else canceled.scope)
        yield _row("canceled", None, None, (None, id_, None), at, canceled.at_ms, None, None, within)


_MessageRun = tuple[int | None, str | None, int | None]
"""A sequence, and the id of its message, or the number of messages from there on."""


def _row(
    kind: str, topic: str | None, group: str | None, message_run: _MessageRun, at: int, at_ms: int,
    visible_ms: int | None = None, attempt: int | None = None, reason: object = None,
) -> Row:  # fmt: skip
    sequence, id_, messages = message_run
    return kind, topic, group, id_, sequence, at, at_ms, visible_ms, attempt, reason, messages, None


def _expression(patterns: tuple[str, ...] | None) -> str | None:
    """Returns a regular expression for the topics of a cancel; None: all topics."""
    return None if patterns is None else "|".join(f"^{fnmatch.translate(pattern)}" for pattern in patterns)


def _paced(
    entries: Iterable[tuple[int, int]], pace: RateLimit, *, at_ms: int, per_second: int | None
) -> Iterator[tuple[_MessageRun, int]]:
    """Yields redriven messages, and when they are ready: up to the rate in one second, then those of the next."""
    for first, messages in entries:
        start, end = first, first + messages
        while start < end:
            visible, count = pace.next_ms(at_ms, per_second=per_second, count_max=end - start)
            yield (start, None, count), visible
            start += count


def named_runs(runs: DataFrame, messages: DataFrame, *, is_whole: bool) -> DataFrame:
    """Expands rows of RUN_SCHEMA on runs to rows of ACTION_SCHEMA, one for each message.

    `is_whole`: nothing of both logs was dropped. Then a message that they do not have gets its sequence as a name, so
    that it is classified; else it was dropped, and is no evidence. This relies on the log's rule that messages,
    including copies of scheduled ones, are durable before they are delivered.
    """
    concerned = runs.where("messages is not null").withColumn("first", runs["sequence"])
    expanded = concerned.selectExpr(
        *(name for name in _action_columns() if name != "sequence"),
        "explode(sequence(first, first + messages - 1)) as sequence",
    )
    ids_by_sequence = messages.where("sequence is not null").selectExpr("topic", "sequence", "id as known")
    joined = expanded.join(ids_by_sequence, ["topic", "sequence"], "left" if is_whole else "inner")
    return joined.selectExpr(*("coalesce(known, topic || '#' || sequence) as id" if name == "id" else name
                               for name in _action_columns()))  # fmt: skip


def single(runs: DataFrame) -> DataFrame:
    """Returns the rows of RUN_SCHEMA on one message or a whole group, as rows of ACTION_SCHEMA."""
    return runs.where("messages is null").select(*_action_columns())


def _action_columns() -> list[str]:
    return [column.split()[0] for column in ACTION_SCHEMA.split(", ")]
