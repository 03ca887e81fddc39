"""What a log says since its newest whole checkpoint, and where it ends. Reads only.

A log is segments that are numbered through, each of which begins at the offset at which the one before ends. A
checkpoint is a state in parts, between other blocks: each part names the offset at which the state was captured, and
what stands from there on is replayed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from outbox_broker.segments.port import SegmentInfo, SegmentReader
from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    Block,
    Frame,
    FrameKind,
    block_head_at,
    changes_of,
)
from outbox_core.journal.checkpoint_parts import CheckpointParts, JournalCheckpoint
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)

_CHECKPOINTS: Final = frozenset({FrameKind.CHECKPOINT})


class _Scanned(NamedTuple):
    """A segment's blocks: the position behind the last one, how many frames that has, the offset up to which a block of
    this segment says that the log is durable, and the parts of checkpoints.
    """

    end: int
    frames: int
    durable: int
    parts: CheckpointParts


class JournalReplay:
    """The blocks of one log from its newest whole checkpoint on."""

    def __init__(self, segments: SegmentReader, name: str, *, has_checkpoints: bool = True) -> None:
        """Find the end of the log `name`, and its checkpoint, if it `has_checkpoints`.

        Raises SegmentDamaged if a segment is missing, or no checkpoint is whole though one must be; StorageFailed;
        SegmentRefused at what a newer version wrote.
        """
        self._reader = segments
        self.segments = _segments_of(segments.list(), name)
        """Those that count, in order."""
        self.unacknowledged: SegmentInfo | None = None
        """A segment behind the log's end. It was begun before the one before it was durable, so that nothing in it was
        acknowledged; it must be deleted before anything is appended."""
        self.unproven: SegmentInfo | None = None
        """The segment before the newest, if it is whole, and nothing says that it is durable: it must be made so before
        anything behind it is acknowledged."""
        self.end = 0
        """The offset behind the last whole block."""
        self.frames = 0
        """How many frames that block has."""
        self.durable = 0
        """Up to where a block says that the log is durable."""
        self._damaged: dict[int, int] = {}  # bytes by offset: a segment may be read again
        self.checkpoint: JournalCheckpoint | None = None
        """None: the log has none, and begins with the beginning."""
        self.parts_bytes = 0
        """Bytes of the blocks behind the checkpoint's capture that are parts of checkpoints."""
        if self.segments:
            scanned = self._find_end()
            if has_checkpoints:
                self._find_checkpoint(scanned)

    @property
    def damaged_bytes(self) -> int:
        """Of the blocks that were read and are damaged, though nothing may be lost of them; each counts once."""
        return sum(list(self._damaged.values()))  # a copy: another thread may read a segment again

    def blocks(self, wanted: Container[int], *, may_lose_changes: bool = False) -> Iterator[Block]:
        """Yields the blocks of wanted kinds from the checkpoint on, or from the beginning; `position` and `end` are
        offsets of the log. Where frames are damaged, the block says how many; one of unknown kind comes, too.

        Changes come once each, in order. One of which no copy is whole is not passed over: what follows it cannot be
        applied, unless the caller knows how (`may_lose_changes`: `damaged` says then that some are lost). Raises
        SegmentDamaged at one, and at a segment that ends too early; StorageFailed.
        """
        begin = 0 if self.checkpoint is None else self.checkpoint.captured
        for segment, limit, is_newest in self._spans():
            if not is_newest and segment.first + limit <= begin:
                continue
            # Behind the newest segment nothing vouches for its end but what itself says.
            proven = 0 if is_newest else limit
            for block in self.blocks_in(segment, wanted, limit=limit, proven=proven, begin=begin):
                yield self._checked(segment, block, wanted, may_lose_changes=may_lose_changes)

    def blocks_in(
        self, segment: SegmentInfo, wanted: Container[int], *, limit: int, proven: int, begin: int = 0
    ) -> Iterator[Block]:  # fmt: skip
        """Yields the blocks of wanted kinds, and of unknown ones, of a segment that ends at the position `limit`, from
        the offset `begin` on; their positions are offsets of the log. `proven` as in the port. Logs and counts what is
        damaged. Raises SegmentDamaged, last, if the segment ends too early.
        """
        first, end = segment.first, 0
        for block in self._reader.blocks(segment.name, proven=proven, wanted=wanted):
            if block.position >= limit:
                break  # of an append that failed halfway, before the next segment was begun
            end = min(block.end, limit)
            if first + block.position < begin or (block.kind is not None and block.kind not in wanted):
                continue
            if block.damaged is None or block.damaged > 0 or block.at_ms is None:
                self._damaged[first + block.position] = end - block.position
                logger.error("block_damaged", extra=_damage(segment, block))
            yield block._replace(end=end).moved(first)
        if end < limit:
            self._damaged[first + end] = limit - end
            raise _ends_early(segment, end, limit)

    def _checked(self, segment: SegmentInfo, block: Block, wanted: Container[int], *, may_lose_changes: bool) -> Block:
        """Returns a block with each change once. Raises SegmentDamaged."""
        if FrameKind.CHANGE not in wanted or block.kind not in {None, FrameKind.CHANGE}:
            return block
        changes = changes_of(block.frames)
        count = None if block.damaged is None else len(block.frames) + block.damaged
        # A block of changes has two frames of each, and nothing else; one of unknown kind may have been of changes.
        # With messages in it it would have to say how many are changes: their numbers have room for that above 16 bits.
        is_whole = block.kind is not None and count == 2 * len(changes)
        if not is_whole and not may_lose_changes:
            raise SegmentDamaged(
                f"{segment.name}: a change of state at {block.position - segment.first} is lost; "
                f"restore {segment.name} from a copy"
            )
        frames = [Frame(FrameKind.CHANGE, change_number, changes[change_number]) for change_number in sorted(changes)]
        return block._replace(frames=frames, starts=[], damaged=0 if is_whole else block.damaged or 1)

    # -- end and checkpoint ------------------------------------------------------------------------------------------

    def _spans(self) -> Iterator[tuple[SegmentInfo, int, bool]]:
        """Yields each segment that counts, the position at which it ends, and whether it is the newest."""
        for segment, following in pairwise(self.segments):
            yield segment, following.first - segment.first, False
        newest = self.segments[-1:]
        yield from ((segment, self.end - segment.first, True) for segment in newest)

    def _find_end(self) -> dict[str, CheckpointParts]:
        """Find the end of the newest segment that counts; returns the parts of the segments that were scanned."""
        newest = self.segments[-1]
        tail = self._scan(newest, proven=0)
        scanned = {newest.name: tail.parts}
        if len(self.segments) > 1 and tail.durable < newest.first:
            # Nothing in the newest segment says that the one before is durable. A kill after a roll may have kept the
            # newest one's blocks without all of those before them; commit() acknowledges none of them before these.
            before = self.segments[-2]
            limit = newest.first - before.first
            is_sealed = before.end is not None
            found = self._scan(before, proven=limit if is_sealed else max(0, tail.durable - before.first), limit=limit)
            scanned[before.name] = found.parts
            if found.end >= limit:
                self.unproven = None if is_sealed else before
            elif is_sealed or tail.durable > before.first + found.end:
                raise _ends_early(before, found.end, limit)
            else:
                self.unacknowledged = self.segments.pop()
                newest, tail = before, found
        self.end, self.frames, self.durable = newest.first + tail.end, tail.frames, tail.durable
        return scanned

    def _find_checkpoint(self, scanned: dict[str, CheckpointParts]) -> None:
        """Search back from the newest segment: a checkpoint's parts may be in several."""
        found = CheckpointParts()
        for segment, limit, is_newest in reversed(list(self._spans())):
            if segment.name not in scanned:
                scanned[segment.name] = self._scan(segment, proven=0 if is_newest else limit, limit=limit).parts
            found.update(scanned[segment.name])
            self.checkpoint = found.newest_whole()
            if self.checkpoint is not None:
                break
        oldest, captured = self.segments[0], -1 if self.checkpoint is None else self.checkpoint.captured
        self.parts_bytes = found.size_bytes_from(captured)
        for later in found.captured_behind(captured):
            logger.warning("checkpoint_not_whole", extra={"segment": self.segments[-1].name, "offset": later})
        if self.checkpoint is None and number_of(oldest) != 1:
            # Segments are dropped only behind two whole checkpoints.
            raise SegmentDamaged(f"{oldest.name}: no checkpoint is whole; restore the log's segments from a copy")
        if self.checkpoint is not None and captured < oldest.first:
            raise SegmentDamaged(f"the segment before {oldest.name} is missing; restore it from a copy")

    def _scan(self, segment: SegmentInfo, *, proven: int, limit: int | None = None) -> _Scanned:
        """Read a segment, up to a position."""
        last: Block | None = None
        headed: Block | None = None
        parts = CheckpointParts()
        for block in self._reader.blocks(segment.name, proven=proven, wanted=_CHECKPOINTS):
            if limit is not None and block.position >= limit:
                break
            last = block
            headed = block if block.at_ms is not None else headed
            parts.add(block.frames)
            if block.kind == FrameKind.CHECKPOINT and block.damaged:
                logger.error("block_damaged", extra=_damage(segment, block))
        if last is None:
            return _Scanned(0, 0, 0, parts)
        frames, durable = len(last.frames) + (last.damaged or 0), 0
        if headed is not None:  # the frames of a block that nobody wants are not counted
            data = self._reader.read(segment.name, headed.position, BLOCK_HEAD_BYTES)
            head = block_head_at(data, 0, first=segment.first + headed.position)
            if head is not None:
                frames, durable = head.frames if headed is last else frames, head.durable
        return _Scanned(last.end if limit is None else min(last.end, limit), frames, durable, parts)


def number_of(segment: SegmentInfo) -> int:
    """Returns the number of a log's segment, from 1 on."""
    return int(segment.name.rpartition("-")[2])


def segment_name(log: str, number: int) -> str:
    """Returns the name of a log's segment with a number, from 1 on."""
    return f"{log}-{number:012d}"


def _segments_of(infos: Sequence[SegmentInfo], log: str) -> list[SegmentInfo]:
    """Returns the segments of a log in their order. Raises SegmentDamaged if one in the middle is missing: they are
    deleted one after the other, oldest first, and one is begun only once the one before is in its medium for good.
    """
    segments = sorted((segment for segment in infos if segment.name.rpartition("-")[0] == log), key=number_of)
    for before, segment in pairwise(segments):
        # Where a segment cannot be gone on with, one in which nothing was durable is followed by another at its offset.
        if number_of(segment) != number_of(before) + 1 or segment.first < before.first:
            missing = segment_name(log, number_of(segment) - 1)
            raise SegmentDamaged(f"{missing} is missing before {segment.name}; restore it from a copy")
    return segments


def _damage(segment: SegmentInfo, found: Block) -> dict[str, object]:
    return {"segment": segment.name, "position": found.position, "frames_damaged": found.damaged}


def _ends_early(segment: SegmentInfo, end: int, limit: int) -> SegmentDamaged:
    return SegmentDamaged(f"{segment.name}: it ends at {end} instead of {limit}; restore it from a copy")
