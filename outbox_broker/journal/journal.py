"""A log: blocks of frames over the segments of one owner; group commits, rolls, checkpoints, retention.

A broker has one for each log; what the frames mean is its owner's. What is read of a log is in replay.py.

A segment that has grown long is followed by another one, which is begun by the next append; nobody waits for that
under the owner's lock. The rule of all crashes: nothing is acknowledged before everything in the segments before it.

| killed | what the next owner finds |
|---|---|
| within an append | the block is whole, or a torn tail, which is cut |
| after a roll, before the old segment is durable | its end, which is made durable then; or not: the new segment goes |
| after the old segment is sealed | both |
| within a checkpoint | its parts count for nothing: the checkpoint before it does |
| within a drop | a later beginning, never a hole |
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from outbox_broker.journal.replay import JournalReplay, number_of, segment_name
from outbox_broker.log.disk_reserve import may_pass
from outbox_broker.segments.port import SegmentInfo, Segments, SegmentWriter
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAMES_MAX,
    PAYLOAD_BYTES_MAX,
    Block,
    Framed,
    FrameKind,
    SegmentKind,
    block,
    framed,
    framed_changes,
)
from outbox_core.journal.checkpoint_parts import checkpoint_part
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

SEGMENT_BYTES: Final = 128 * 1024 * 1024
"""After which a segment is followed by another one: a restart reads the newest one."""
CHECKPOINTS_KEPT: Final = 2
"""If the newest one is damaged, the one before it counts."""


class SegmentDropped(StorageFailed):
    """What was read was dropped meanwhile."""


@dataclass(slots=True, eq=False)
class _Tail:
    """A segment that is appended to, or was until a roll. `is_confirmed`: a commit has returned for it."""

    writer: SegmentWriter
    first: int
    roll_at: int
    """How long it may be. A roll that failed has it doubled."""
    is_confirmed: bool = False


class Journal:
    """One log. append(), roll(), seal(), is_roll_due, `newest` and `end` need the caller's lock; all else is
    thread-safe.

    Before it is appended to, what was `recovered` is read, then resume() is called.
    """

    def __init__(
        self, segments: Segments, *, name: str, kind: SegmentKind, segment_bytes: int = SEGMENT_BYTES,
        has_checkpoints: bool = True,
    ) -> None:  # fmt: skip
        """Find the end of the log whose segments are called `name`-1, -2, ... One without checkpoints is not replayed:
        its owner reads its segments, and drops any of them. Raises as JournalReplay does.
        """
        self._segments = segments
        self._name = name
        self._kind = kind
        self._segment_bytes = segment_bytes
        self._has_checkpoints = has_checkpoints
        self.recovered = JournalReplay(segments, name, has_checkpoints=has_checkpoints)
        """What the log said at the opening; its checkpoint until resume()."""
        self._infos = list(self.recovered.segments)
        for segment in self._infos:
            # Without an epoch its head is damaged, and the kind not known.
            if segment.epoch and segment.kind is not kind:
                raise SegmentDamaged(
                    f"{segment.name}: it is a segment of another log, or was renamed; restore it from a copy"
                )
        self._end = self.recovered.end
        self._frames = self.recovered.frames  # of the last block of the newest segment
        self._durable = 0
        self._committed = 0
        self._dropped_to = 0
        self._tails: deque[_Tail] = deque()  # segments that may not be durable, and the newest
        self._is_roll_wanted = False
        self._has_leftover = False
        """Whether a roll failed of which something may be left: until it is replaced, nothing may be appended to the
        segment before it, which would grow into its offsets."""
        self._is_sealed = False
        self._guard = threading.Lock()
        """Guards the fields above against commits and reads. Never held while anything is waited for; innermost."""
        self._sealing = threading.Lock()
        """Held while rolled segments are sealed: a writer is sealed by one thread."""
        self._dropping = threading.Lock()
        self._kept: list[tuple[int, int]] = []  # where checkpoints were captured, and the offsets behind them
        if self.recovered.checkpoint is not None:
            self._kept.append((self.recovered.checkpoint.captured, self._end))
        self.checkpoint_bytes = sum(map(len, self.recovered.checkpoint.parts)) if self.recovered.checkpoint else 0
        """How much the newest checkpoint has."""
        self._grown_from = self._kept[-1][0] if self._kept else 0
        self._parts_bytes = self.recovered.parts_bytes  # of checkpoints, from there on

    # -- recovery ----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Become able to append: where the log ends, or in another segment from the first append on. Raises
        StorageFailed.
        """
        replay = self.recovered
        if replay.unacknowledged is not None:
            # Before any append: what is appended at the end would else be followed by this segment's blocks.
            logger.warning("unacknowledged_segment_removed", extra={"segment": replay.unacknowledged.name})
            self._segments.delete([replay.unacknowledged.name])
        if replay.unproven is not None:
            # A process that was killed may have left it to the page cache: a power failure, later on, must not take it
            # from before what this owner acknowledges.
            limit = replay.segments[-1].first - replay.unproven.first
            proven = self._segments.reopen(replay.unproven.name, end=limit)
            if proven is not None:
                proven.seal()
        replay.checkpoint = None  # it was read, and may have hundreds of megabytes
        self._durable, self._committed = replay.durable, self._end
        if not self._infos:
            return
        newest = self._infos[-1]
        writer = self._segments.reopen(newest.name, end=self._end - newest.first)
        if writer is None:
            self._durable = self._end
            return
        self._tails.append(_Tail(writer, newest.first, self._segment_bytes, is_confirmed=True))
        self._note_durable(newest.first, writer.commit(0))

    # -- appends -----------------------------------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """The offset behind the last block."""
        return self._end

    @property
    def durable(self) -> int:
        """The offset up to which all is known to be durable; it may lag. 0 where syncs are left to the system."""
        return self._durable

    @property
    def committed(self) -> int:
        """The offset up to which a commit() has returned, or the log was recovered: what others may see. Where syncs
        are left to the system, it is ahead of what is durable.
        """
        return self._committed

    @property
    def start(self) -> int:
        """The offset at which the oldest segment begins that is there."""
        with self._guard:
            return self._infos[0].first if self._infos else self._end

    @property
    def grown_bytes(self) -> int:
        """Bytes of the blocks that were appended since the newest checkpoint was captured, or tried, without parts of
        checkpoints: else one that is longer than what it is to bound would be a reason for the next one.
        """
        return self._end - self._grown_from - self._parts_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        with self._guard:
            return self._end - self._infos[0].first if self._infos else 0

    @property
    def segments(self) -> Sequence[SegmentInfo]:
        """The segments of the log, in order; `end` of the newest is None."""
        with self._guard:
            return tuple(self._infos)

    @property
    def is_roll_due(self) -> bool:
        """Whether the next append begins a segment, if there is room for it. Once true, it stays so until then.

        Not before a commit has returned for the newest one, and the one before it is sealed: so the newest alone can be
        there without all before it, and none is ever missing.
        """
        tail = self._tails[-1] if self._tails else None
        if tail is None or self._has_leftover:
            return True
        is_wanted = tail.writer.end >= tail.roll_at or (self._is_roll_wanted and tail.writer.end > 0)
        return is_wanted and tail.is_confirmed and len(self._tails) == 1

    @property
    def kept_from(self) -> int:
        """Where the older of the two checkpoints was captured from which on all is kept; 0 while fewer are known."""
        with self._guard:
            return self._checkpoints_first()

    @property
    def epoch(self) -> int:
        """The number of its segments' owner."""
        return self._segments.epoch

    @property
    def newest(self) -> SegmentInfo | None:
        """The newest segment; None if there is none yet."""
        return self._infos[-1] if self._infos else None

    def append(
        self, frames: Framed, *, at_ms: int, roll: bool | None = None, begin_with: Framed | None = None
    ) -> int:  # fmt: skip
        """Append one block of frames(), not durable before commit(), for which it never waits; returns the offset
        behind it. Its last frame ends there. `at_ms`: when it is stored. Raises StorageFailed with nothing appended.

        A roll that is due is put off where there is no room for it. `roll`: whether it begins a segment, as is_roll_due
        was, for a caller that has prepared for that: a commit beside the append may make one due meanwhile. Without
        room for it the append fails. `begin_with`: the block that a segment begins with, if this append begins one.
        """
        if not 0 < len(frames) <= FRAMES_MAX:
            raise ValueError(f"a block has 1 to {FRAMES_MAX} frames, not {len(frames)}")
        tail = self._tails[-1] if self._tails else None
        is_roll = self.is_roll_due if roll is None else roll
        if is_roll and self._append_rolled(frames, tail, at_ms=at_ms, may_put_off=roll is None, begin_with=begin_with):
            return self._end
        if tail is None or self._has_leftover:
            raise StorageFailed(f"{self._name}: a segment must be begun first")
        self._write(tail, [frames], at_ms=at_ms, frames_before=self._frames if tail.writer.end else 0)
        return self._end

    def roll(self) -> None:
        """Begin another segment with the next append for which that is possible."""
        self._is_roll_wanted = True

    def commit(self, end: int | None = None) -> None:
        """Return once everything up to an offset (all, by default) is durable; callers share the work. Raises
        StorageFailed, WriterFenced.
        """
        with self._guard:
            end = self._end if end is None else end
            if end <= self._committed:
                return
            tails = [tail for tail in self._tails if tail.first < end]
        # Oldest first: whatever is acknowledged in a segment, all of those before it is durable then.
        for index, tail in enumerate(tails):
            is_rolled = index + 1 < len(tails)
            known = tail.writer.commit(None if is_rolled else end - tail.first)
            tail.is_confirmed = True
            self._note_durable(tail.first, known)
            if is_rolled:
                self._seal(tail)
        with self._guard:
            self._committed = max(self._committed, end, self._durable)

    def write_checkpoint(
        self, parts: Sequence[bytes], *, captured: int, at_ms: int, lock: AbstractContextManager[object]
    ) -> None:  # fmt: skip
        """Append a state, part by part, and wait until it is durable. The caller held `lock` as it captured the parts,
        and read `captured`, which is `end`; it does not hold it now, and writes one checkpoint at a time.

        Others append between the parts. If it fails, its parts count for nothing: what was appended since `captured` is
        no reason for another attempt, or a full disk would fill with parts. Raises StorageFailed.
        """
        if not parts:
            raise ValueError("a checkpoint has a part")
        with lock:
            self._grown_from, self._parts_bytes = captured, 0
            self.checkpoint_bytes = sum(map(len, parts))
        for part_number, part in enumerate(parts):
            is_last = part_number + 1 == len(parts)
            frames = checkpoint_part(part, captured=captured, number=part_number, is_last=is_last)
            with lock:
                end = self.append(frames, at_ms=at_ms)
                self._parts_bytes += BLOCK_HEAD_BYTES + frames.size_bytes
        self.commit(end)
        with self._guard:
            self._kept.append((captured, end))

    def seal(self) -> None:
        """Make all durable, and accept no more blocks; idempotent. Raises StorageFailed."""
        self.commit()
        with self._guard:
            self._is_sealed = True
            tails = tuple(self._tails)
        for tail in tails:
            self._seal(tail)

    # -- reads and retention -----------------------------------------------------------------------------------------

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Returns the bytes at an offset, fewer at the end of its segment: a block, and so what is read at once, is
        never in two. The caller checks the frames in them. Raises SegmentDropped, StorageFailed.
        """
        with self._guard:
            index = bisect_right(self._infos, offset, key=lambda segment: segment.first) - 1
            segment = self._infos[index] if index >= 0 else None
            limit = self._infos[index + 1].first if 0 <= index < len(self._infos) - 1 else self._end
        if segment is None:
            raise SegmentDropped(f"cannot read {self._name} at {offset}: it was dropped")
        size_bytes = min(size_bytes, limit - offset)  # behind it may be what failed, before a roll
        try:
            return self._segments.read(segment.name, offset - segment.first, size_bytes) if size_bytes > 0 else b""
        except StorageFailed as error:
            if offset < self._dropped_to:
                raise SegmentDropped(f"cannot read {self._name} at {offset}: it is being dropped") from error
            raise

    def blocks_of(self, segment: SegmentInfo, wanted: Container[int]) -> Iterator[Block]:
        """Yields the blocks of wanted kinds, and of unknown ones, of one of the segments; positions are offsets of the
        log. Raises SegmentDamaged, last, if it ends too early; SegmentDropped, StorageFailed.
        """
        with self._guard:
            if segment not in self._infos:
                raise SegmentDropped(f"{segment.name} was dropped")
            index = self._infos.index(segment)
            is_newest = index + 1 == len(self._infos)
            limit = (self._end if is_newest else self._infos[index + 1].first) - segment.first
        # Where the newest one ends was decided at the opening, with the note that is gone once it is appended to.
        return self.recovered.blocks_in(segment, wanted, limit=limit, proven=limit)

    def drop_before(self, offset: int) -> Sequence[SegmentInfo]:
        """Delete the segments that end at or before an offset; returns them. The two newest whole checkpoints, and all
        from the older one on, stay: of an earlier owner's checkpoints only the newest is known. Raises StorageFailed.
        """
        dropped: list[SegmentInfo] = []
        with self._dropping:
            with self._guard:
                limit = min(offset, self._durable_first())
                limit = min(limit, self._checkpoints_first()) if self._has_checkpoints else limit
                ends = [following.first for following in self._infos[1:]]
                old = [segment for segment, end in zip(self._infos, ends, strict=False) if end <= limit]
            for segment in old:
                # One after the other: a power failure may bring back what was deleted last, and must leave no hole.
                self._dropped_to = ends[len(dropped)]
                self._segments.delete([segment.name])
                with self._guard:
                    self._infos.remove(segment)
                dropped.append(segment)
        return dropped

    # -- inner steps -------------------------------------------------------------------------------------------------

    def _append_rolled(
        self, frames: Framed, before: _Tail | None, *, at_ms: int, may_put_off: bool, begin_with: Framed | None
    ) -> bool:  # fmt: skip
        """Append a block that begins a segment, behind the newest one if there is one. If there is no room for it, or
        no file descriptor, and it `may_put_off` the roll, returns False: the log goes on in that one, once nothing is
        left of the new one. Raises StorageFailed.
        """
        if self._is_sealed:
            raise StorageFailed(f"{self._name} is sealed")
        number = number_of(self._infos[-1]) + 1 if self._infos else 1
        name, first = segment_name(self._name, number), self._end
        roll_at = self._segment_bytes + (0 if begin_with is None else begin_with.size_bytes)
        tail = _Tail(self._segments.create(name, kind=self._kind, first=first), first, roll_at)
        try:
            self._write(tail, [frames] if begin_with is None else [begin_with, frames], at_ms=at_ms, frames_before=0)
        except StorageFailed as error:
            tail.writer.abandon()
            try:
                self._segments.delete([name])
            except StorageFailed:
                self._has_leftover = True
                raise error from error.__cause__
            self._has_leftover = False
            if before is None or not may_put_off or not may_pass(error):
                raise
            before.roll_at, self._is_roll_wanted = 2 * before.writer.end, False
            logger.warning("roll_put_off", extra={"segment": before.writer.name, "error": str(error)})
            return False
        self._has_leftover = self._is_roll_wanted = False
        return True

    def _write(self, tail: _Tail, blocks: Sequence[Framed], *, at_ms: int, frames_before: int) -> None:
        data = b""
        for frames in blocks:
            offset = tail.first + tail.writer.end + len(data)
            data += block(frames, offset=offset, durable=self._durable, at_ms=at_ms, frames_before=frames_before)
            frames_before = len(frames)
        tail.writer.append(data)
        with self._guard:
            if not self._tails or self._tails[-1] is not tail:
                self._tails.append(tail)
                self._infos.append(
                    SegmentInfo(
                        name=tail.writer.name, kind=self._kind, first=tail.first, end=None, created_at_ms=at_ms,
                        epoch=self._segments.epoch,
                    )
                )  # fmt: skip
            self._end, self._frames = tail.first + tail.writer.end, frames_before

    def _note_durable(self, first: int, known: int) -> None:
        """A segment is known to be durable up to a position; 0 says nothing, not even of the segments before it: where
        syncs are left to the system, a page may be missing anywhere.
        """
        if known:
            with self._guard:
                self._durable = max(self._durable, first + known)

    def _seal(self, tail: _Tail) -> None:
        with self._sealing:
            if tail not in self._tails:
                return
            tail.writer.seal()
            with self._guard:
                self._tails.remove(tail)

    def _checkpoints_first(self) -> int:
        """The offset from which on all is kept: that of the second newest checkpoint that is surely on the disk. Where
        syncs are left to the system, that is one before the newest segment, since those are synced as they are sealed.
        """
        sure = max(self._durable, self._durable_first())
        while len(self._kept) > CHECKPOINTS_KEPT and self._kept[CHECKPOINTS_KEPT][1] <= sure:
            del self._kept[0]
        are_sure = len(self._kept) >= CHECKPOINTS_KEPT and self._kept[CHECKPOINTS_KEPT - 1][1] <= sure
        return self._kept[0][0] if are_sure else 0

    def _durable_first(self) -> int:
        """The offset at which the oldest segment begins that may not be durable, and must not be dropped yet."""
        return self._tails[0].first if self._tails else self._end


def frames(kind: FrameKind, payloads: Sequence[bytes], *, first_number: int = 0) -> Framed:
    """Returns the frames of a block, to be made outside any lock: numbered through; changes of state twice each, so
    that one flipped bit loses none.

    A block of changes has nothing else. Raises ValueError at a payload that is empty, or too long for a frame.
    """
    if not all(0 < len(payload) <= PAYLOAD_BYTES_MAX for payload in payloads):
        raise ValueError(f"a payload has 1 to {PAYLOAD_BYTES_MAX} bytes")
    if kind != FrameKind.CHANGE:
        return framed(kind, range(first_number, first_number + len(payloads)), payloads)
    changes, copies = framed_changes(payloads)
    changes.extend(copies)
    return changes
