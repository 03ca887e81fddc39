"""The broker's logs: surveys their segments, and converts the records to rows. Without Spark, but for `named_runs`.

The only module that knows the format of the logs. It relies only on outbox_core.journal: its blocks (checksums, torn
tails, damage), and the records of messages and actions. An unknown kind of record is an error, not skipped.
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
    Payloads,
    SegmentHead,
    SegmentKind,
    SegmentRefused,
    changes_of,
    decode_segment_head,
    payloads_in,
    scan,
)
from outbox_core.journal.dead_letter_records import Discarded, Edited, RedriveStopped
from outbox_core.journal.deletion_records import DeletedGroup, DeletedTopic, PurgedTopic
from outbox_core.journal.segment_note import NOTE_SUFFIX, read_note
from outbox_core.messages.message import DUE_HEADER, Record, decode_record
from spark_reconcile.core.errors import NotComparable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DELIVERY_KINDS: Final = (
    "delivered", "extended", "requeued", "acked", "died", "redriven", "redrive_stopped", "discarded",
    "edited",
)  # fmt: skip
"""Actions on a message that was delivered to a group: it was durable before."""
STEP_BACK_MS: Final = 3_600_000
"""Limit of a step back of the broker's clock from one segment to the next, up to which the headers of neighbours bound
a segment's times.
"""


ASIDE: Final = "aside"
"""The kind of the action that a group has a message aside from its topic: it is of no delivery."""
LOGS: Final = {"messages": SegmentKind.MESSAGES, "actions": SegmentKind.ACTIONS}
"""The broker's logs, and the kind of their segments."""
MESSAGE_KINDS: Final = frozenset(
    {FrameKind.MESSAGE, FrameKind.DISPATCHED, FrameKind.SCHEDULED, FrameKind.CANCELED}
)  # fmt: skip
"""The kinds of the frames that are messages; a block may have several of them."""
NUMBERED_KINDS: Final = frozenset({FrameKind.MESSAGE, FrameKind.DISPATCHED})
"""Those whose number is the message's sequence in its topic."""
ACTION_KINDS: Final = frozenset({FrameKind.CHANGE})
"""The kind of the frames that are actions."""
CHECKPOINT_KINDS: Final = frozenset({FrameKind.CHECKPOINT})
"""The kind of the frames that are parts of a checkpoint, between the actions."""
_KINDS: Final = frozenset(FrameKind)
_SEGMENT: Final = re.compile(r"[a-z]+-(\d{12})\.segment")
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
    """Blocks that end within so many bytes were read before, and are skipped."""


def survey(folder: Path, log: str) -> list[LogSegment]:
    """Lists the segments of `messages` or `actions`, oldest first, and their sizes: at least one, which is empty where
    the broker has not begun any. The newest is left out until it has its head. Reads only heads.

    Raises ConfigurationError if this is no broker's data folder, or one of an earlier version, and NotComparable if a
    segment is missing, truncated or damaged in its head.
    """
    kind, paths = LOGS[log], _paths_of(folder / log, log)
    segments: list[LogSegment] = []
    try:
        if paths and _is_unfinished(paths[-1]):
            paths.pop()
        for path in paths:
            note = read_note(path)  # first: the broker notes what is in the file already
            head, stat = _head_of(path, kind), path.stat()
            if stat.st_size < SEGMENT_HEAD_BYTES + (0 if note is None else note.end):
                raise NotComparable(
                    f"the broker's segment {path} ends at {stat.st_size} bytes, before what was durable; restore it "
                    "from a copy"
                )
            segments.append(
                LogSegment(
                    path=str(path), first_offset=head.first, created_at_ms=head.created_at_ms,
                    size_bytes=stat.st_size, last=path == paths[-1], changed_ns=stat.st_mtime_ns,
                )
            )  # fmt: skip
    except OSError as error:
        raise NotComparable(f"cannot read the broker's segment {error.filename}: {error.strerror}") from error
    if not segments:
        path = folder / log / f"{log}-{1:012d}.segment"
        return [LogSegment(path=str(path), first_offset=0, created_at_ms=0, size_bytes=0, last=True)]
    return [*(_ended(segment, following) for segment, following in pairwise(segments)), segments[-1]]


def _paths_of(folder: Path, log: str) -> list[Path]:
    """Returns the files of a log's segments in their order. Raises ConfigurationError, NotComparable."""
    # The notes first: one is made behind its segment, and removed before it.
    notes = sorted(path.stem for path in folder.glob(f"{log}-*{NOTE_SUFFIX}"))
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"{folder.parent} is not a broker's data folder: it has no folder {log}; name the folder that was given to "
            "`outbox broker serve --data`"
        ) from error
    except OSError as error:  # glob() would find nothing, as in the folder of a broker that has not begun the log
        raise NotComparable(f"cannot read {folder}: {error.strerror}") from error
    paths = [path for path in found if path.stem.rpartition("-")[0] == log and _SEGMENT.fullmatch(path.name)]
    if notes and notes[-1] > (paths[-1].stem if paths else ""):
        raise NotComparable(
            f"{notes[-1]} is missing in {folder}, the newest segment of the broker's log, of which there is a note: "
            "restore it from a copy"
        )
    earlier = [path.name for path in found if path.suffix == _EARLIER_SUFFIX]
    if earlier and not paths:
        raise ConfigurationError(
            f"{folder} holds segments of an earlier format ({earlier[0]}): reconcile it with the version that wrote it"
        )
    return paths


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
        known[last.path] = SEGMENT_HEAD_BYTES + end_offset - last.first_offset
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


MESSAGE_SCHEMA: Final = (
    "id string, topic string, message_key string, sequence bigint, body_sha256 string, created_ms bigint, "
    "stored_ms bigint, deliver_at_ms bigint, damage string"
)
HEADER_SCHEMA: Final = MESSAGE_SCHEMA.replace("damage", "headers binary, damage")
"""A stored message with its headers, a map in MessagePack."""
ACTION_SCHEMA: Final = (
    "kind string, topic string, consumer_group string, id string, sequence bigint, position bigint, at_ms bigint, "
    "visible_at_ms bigint, attempt bigint, reason string, damage string"
)
"""An action on one message, or on a whole group. Of kind ASIDE (see messages_aside): `at_ms` is when the message was
created, `visible_at_ms` when it became ready, `attempt` its due time, `reason` the id that an edit gave it.
"""
RUN_SCHEMA: Final = ACTION_SCHEMA.replace("damage", "messages bigint, damage")
"""An action as it is written: if `messages` is not null, on so many messages from `sequence` on, and `id` is null.
Of the kinds ASIDE and "edited" `visible_at_ms` is when the message became ready, `attempt` the offset of its frame.
"""
DUE_DIGITS_MAX: Final = 15
SCHEMAS: Final = {"messages": MESSAGE_SCHEMA, "actions": RUN_SCHEMA}

Row = tuple[Any, ...]


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
    """A frame of a log, and when it was stored; 0 if nobody knows. `position` is unique in its log, and grows."""

    kind: int
    number: int
    payload: bytes
    stored_ms: int
    position: int


def payloads_of(segment: LogSegment, *, wanted: Container[int], payloads_max: int) -> Iterator[tuple[bytes, Payloads]]:
    """Yields the payloads of a segment's whole blocks, but for those that were read before, about `payloads_max` at a
    time, with the bytes of all blocks. The rest, from the `end` of the last ones on, is what blocks_of() tells.
    """
    data = _data_of(segment, 0)
    end = 0
    while True:
        found = payloads_in(
            data, end, first=segment.first_offset, wanted=wanted, frames_max=payloads_max,
            known=segment.known_bytes - SEGMENT_HEAD_BYTES,
        )  # fmt: skip
        if found.end == end:
            return
        end = found.end
        yield data, found


def blocks_of(segment: LogSegment, *, wanted: Container[int], start: int = 0) -> Iterator[LoggedBlock]:
    """Yields the blocks of a segment, except those that were read before; in the last one, up to a torn tail.

    `wanted`: the kinds of blocks whose frames are read; others may have none. `start`: where a block begins, behind the
    segment's head. Raises SegmentDamaged if the segment ends too early, SegmentRefused at what a newer version wrote,
    and OSError.
    """
    data = _data_of(segment, start)
    first, end = segment.first_offset + start, 0
    proven = 0 if segment.last else first + len(data)
    # As if the machine had not been started anew: only the last append can be cut short then, and all else that is not
    # whole is told as damage. The broker may cut it away at its next start; here nothing may be passed over silently.
    for found in scan(data, first=first, proven=proven, same_boot=True, wanted=wanted):
        end = found.end
        if SEGMENT_HEAD_BYTES + start + end > segment.known_bytes:
            yield _logged(found, first, wanted)
    missing = segment.size_bytes - SEGMENT_HEAD_BYTES - start - end
    if missing > 0 and not segment.last:
        raise journal.SegmentDamaged(f"its last {missing} bytes are missing, and it is not the last segment")


def _data_of(segment: LogSegment, start: int) -> bytes:
    """Returns the bytes of a segment's blocks as they were surveyed, from a position on."""
    size_bytes = segment.size_bytes - SEGMENT_HEAD_BYTES - start
    if size_bytes <= 0:  # there may be no file yet
        return b""
    with Path(segment.path).open("rb") as file:
        file.seek(SEGMENT_HEAD_BYTES + start)
        return file.read(size_bytes)


def _logged(found: Block, first: int, wanted: Container[int]) -> LoggedBlock:
    changes = changes_of(found.frames)
    others = [frame for frame in found.frames if frame.kind != FrameKind.CHANGE]
    copies_lost = 2 * len(changes) - (len(found.frames) - len(others))
    # Without the head, the kind is that of the first whole frame, and the damaged ones may be of another kind: but for
    # those of a footer, whose block has nothing else.
    is_wanted = found.kind in wanted or (found.at_ms is None and found.kind != FrameKind.FOOTER)
    return LoggedBlock(
        kind=found.kind, stored_ms=found.at_ms, offset=first + found.position, end=first + found.end,
        frames=[*(Frame(FrameKind.CHANGE, number, changes[number]) for number in sorted(changes)), *others],
        is_lost=found.damaged is None or (is_wanted and found.damaged > copies_lost),
    )  # fmt: skip


def frames_of(segment: LogSegment, *, wanted: Container[int], start: int = 0) -> Iterator[LoggedFrame]:
    """Yields the frames of the wanted kinds, each change of state once: as blocks_of(), and raises SegmentDamaged at a
    block of which one is lost, too.
    """
    for block in blocks_of(segment, wanted=wanted, start=start):
        if block.kind is not None and block.kind not in _KINDS:
            raise journal.SegmentDamaged(f"a block of the unknown kind {block.kind:#x} at offset {block.offset}")
        if block.is_lost:
            raise journal.SegmentDamaged(f"damaged block at offset {block.offset}")
        for index, frame in enumerate(block.frames):
            if frame.kind in wanted:
                yield LoggedFrame(*frame, stored_ms=block.stored_ms or 0, position=block.offset + index)


def frames_found(segment: LogSegment, data: bytes, found: Payloads) -> Iterator[LoggedFrame]:
    """Yields the frames of payloads_of()."""
    first = segment.first_offset
    for (frame, stored_ms), begin in zip(found.frames(data), found.begins, strict=True):
        yield LoggedFrame(*frame, stored_ms=stored_ms, position=first + begin)


def message_rows(frame: LoggedFrame) -> Iterator[Row]:
    """Yields a stored message as a row of MESSAGE_SCHEMA; `stored_ms` is null for the copy written when it fell due."""
    yield (*_message(frame, decode_record(frame.payload)), None)


def header_rows(frame: LoggedFrame) -> Iterator[Row]:
    """Yields a stored message as a row of HEADER_SCHEMA."""
    record = decode_record(frame.payload)
    yield (*_message(frame, record), msgspec.msgpack.encode(record.headers), None)


def _message(frame: LoggedFrame, record: Record) -> Row:
    # A scheduled message says when it was stored where it arrived, which may be dropped by now; its copy, when it fell
    # due. A delay cluster's shards do not keep when a message was stored, and a block's time is lost with its head: it
    # was stored soon after it was created.
    stored_ms = None if frame.kind == FrameKind.DISPATCHED else frame.stored_ms or record.created_at_ms
    sequence = frame.number if frame.kind in NUMBERED_KINDS else None
    deliver_at_ms = asked_due_ms(record.headers) if record.deliver_at_ms is None else record.deliver_at_ms
    body_sha256 = hashlib.sha256(record.body).hexdigest()
    return (
        record.id, record.topic, record.key, sequence, body_sha256, record.created_at_ms, stored_ms, deliver_at_ms,
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
        case Edited() | journal.MovedAside() as placed:
            yield from _placed_rows(placed, at)
        case RedriveStopped(topic=topic, group=group, at_ms=at_ms, entries=entries, by=by):
            for first, count in entries:
                yield _row("redrive_stopped", topic, group, (first, None, count), at, at_ms, None, None, by)
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


def _placed_rows(placed: Edited | journal.MovedAside, at: int) -> Iterator[Row]:
    """Yields a row for each message that a group has aside from its topic from then on; the column `attempt` has the
    offset of its frame.
    """
    topic, group, at_ms = placed.topic, placed.group, placed.at_ms
    if isinstance(placed, Edited):
        for sequence, offset, _, new_id in placed.entries:  # the column `reason` has the edited message's id
            yield _row("edited", topic, group, (sequence, None, 1), at, at_ms, at_ms, offset, new_id)
        return
    for sequence, offset, size_bytes, ready_ms in placed.entries:
        if size_bytes:  # else it is in no segment any more
            yield _row(ASIDE, topic, group, (sequence, None, None), at, at_ms, ready_ms, offset)


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


def named_runs(
    runs: DataFrame, messages: DataFrame, *, is_whole: bool, asides: DataFrame | None = None
) -> DataFrame:  # fmt: skip
    """Expands rows of RUN_SCHEMA on runs to rows of ACTION_SCHEMA, one for each message.

    `is_whole`: nothing of both logs was dropped. Then a message that they do not have gets its sequence as a name, so
    that it is classified; else it was dropped, and is no evidence. This relies on the log's rule that messages,
    including copies of scheduled ones, are durable before they are delivered. `asides`: the actions of kind ASIDE,
    which name messages that their groups alone still have.
    """
    from pyspark.sql.functions import coalesce

    concerned = runs.where("messages is not null").withColumn("first", runs["sequence"])
    expanded = concerned.selectExpr(
        *(name for name in _action_columns() if name != "sequence"),
        "explode(sequence(first, first + messages - 1)) as sequence",
    )
    ids_by_sequence = messages.where("sequence is not null").selectExpr("topic", "sequence", "id as known")
    if asides is None:
        joined = expanded.join(ids_by_sequence, ["topic", "sequence"], "left" if is_whole else "inner")
    else:
        theirs = asides.selectExpr("topic", "consumer_group", "sequence", "id as aside_id").distinct().hint("broadcast")
        looked_up = expanded.join(ids_by_sequence, ["topic", "sequence"], "left").join(
            theirs, ["topic", "consumer_group", "sequence"], "left"
        )
        named = looked_up.withColumn("known", coalesce("known", "aside_id"))
        joined = named if is_whole else named.where("known is not null")
    return joined.selectExpr(*("coalesce(known, topic || '#' || sequence) as id" if name == "id" else name
                               for name in _action_columns()))  # fmt: skip


def under_former_ids(rows: DataFrame, actions: DataFrame) -> DataFrame:
    """Returns the inboxes' rows with the effects of edited messages under the ids that these had before: an edit goes
    on with its message, in the group in which that died. What an operator makes of a message has no evidence but this.

    `actions`: those of ACTION_SCHEMA. An edit of an edited message names, by its sequence, the first one, too.
    """
    edits = actions.where(f"kind in ('edited', '{ASIDE}') and reason is not null").selectExpr(
        "topic", "consumer_group", "reason as id", "id as former_id"
    ).distinct()  # fmt: skip
    joined = rows.join(edits.hint("broadcast"), ["topic", "consumer_group", "id"], "left")
    return joined.selectExpr(
        *("coalesce(former_id, id) as id" if name == "id" else name for name in rows.columns)
    )  # fmt: skip


def single(runs: DataFrame) -> DataFrame:
    """Returns the rows of RUN_SCHEMA on one message or a whole group, as rows of ACTION_SCHEMA; without those of kind
    ASIDE, which have no id.
    """
    return runs.where(f"messages is null and kind != '{ASIDE}'").select(*_action_columns())


def _action_columns() -> list[str]:
    return [column.split()[0] for column in ACTION_SCHEMA.split(", ")]
