"""The broker's log of actions, as tests write, read, damage and count it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from outbox_core.journal.block import (
    BLOCK_HEAD_BYTES,
    FRAME_HEAD_BYTES,
    SEGMENT_HEAD_BYTES,
    Block,
    Framed,
    FrameKind,
    SegmentHead,
    SegmentKind,
    changes_of,
    decode_segment_head,
    framed_changes,
    scan,
)
from outbox_core.journal.block import block as block_of
from outbox_core.journal.checkpoint_parts import CheckpointParts
from outbox_core.journal.journal import Action, decode_action, encode_record


class StoredAction(NamedTuple):
    """An action, and where its block begins and ends in its file."""

    action: Action
    begin: int
    end: int


def action_segments(folder: Path) -> list[Path]:
    """The files of a data folder's log of actions, oldest first."""
    return sorted((folder / "actions").glob("actions-*.segment"))


def blocks_in(path: Path) -> Iterator[Block]:
    """The blocks of a file, positions counted from its first byte, up to a torn tail."""
    data = path.read_bytes()
    head = decode_segment_head(data)
    for block in scan(data[SEGMENT_HEAD_BYTES:], first=head.first, proven=0, same_boot=True):
        yield block.moved(SEGMENT_HEAD_BYTES)


def stored_actions(path: Path) -> list[StoredAction]:
    """The actions of a file, each once."""
    return [
        StoredAction(decode_action(payload), block.position, block.end)
        for block in blocks_in(path)
        if block.kind == FrameKind.CHANGE
        for payload in changes_of(block.frames).values()
    ]


def actions_of(folder: Path) -> list[Action]:
    """All actions of a data folder."""
    return [stored.action for path in action_segments(folder) for stored in stored_actions(path)]


def damage_action(path: Path, stored: StoredAction, *, both: bool = True) -> None:
    """Flip a bit in an action: in both of its copies, or in the first alone."""
    data = bytearray(path.read_bytes())
    begin = stored.begin + BLOCK_HEAD_BYTES + FRAME_HEAD_BYTES
    data[begin + 3] ^= 1
    if both:
        data[(stored.end + stored.begin + BLOCK_HEAD_BYTES) // 2 + FRAME_HEAD_BYTES + 3] ^= 1
    path.write_bytes(data)


def checkpoints(folder: Path) -> list[Block]:
    """The blocks of a data folder's log that are parts of checkpoints."""
    return [
        block for path in action_segments(folder) for block in blocks_in(path) if block.kind == FrameKind.CHECKPOINT
    ]


def whole_checkpoint(folder: Path) -> int | None:
    """Where the newest whole checkpoint was captured; None if there is none."""
    parts = CheckpointParts()
    for block in checkpoints(folder):
        parts.add(block.frames)
    newest = parts.newest_whole()
    return None if newest is None else newest.captured


def damage_checkpoints(folder: Path, *, captured: int | None = None) -> int:
    """Flip a bit in each part of all checkpoints, or of the one that was captured there; returns how many."""
    count = 0
    for path in action_segments(folder):
        data = bytearray(path.read_bytes())
        for block in blocks_in(path):
            if block.kind == FrameKind.CHECKPOINT and block.frames and captured in {None, captured_of(block)}:
                data[block.end - 10] ^= 1
                count += 1
        path.write_bytes(data)
    return count


def captured_of(part: Block) -> int:
    """Where the checkpoint was captured that this is a part of."""
    [frame] = part.frames
    return int.from_bytes(frame.payload[:8], "little")


def write_actions(
    folder: Path, records: Sequence[object], records_a_segment: int, *, created_at_ms: int, first_offset: int = 0,
    first_number: int = 1,
) -> list[Path]:  # fmt: skip
    """Write a log of actions, `actions` in a data folder or what `folder` is called, each in a block of its own."""
    return write_segments(
        folder, records, records_a_segment, kind=SegmentKind.ACTIONS, append=append_actions,
        created_at_ms=created_at_ms, first_offset=first_offset, first_number=first_number,
    )  # fmt: skip


def write_segments(
    folder: Path, records: Sequence[object], records_a_segment: int, *, kind: SegmentKind,
    append: Callable[[Path, Sequence[object]], None], created_at_ms: int, first_offset: int, first_number: int,
) -> list[Path]:  # fmt: skip
    """Write a log in place of what is there, so many records a segment, by what appends some to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = kind.name.lower()
    for old in folder.glob(f"{name}-*"):
        old.unlink()
    paths: list[Path] = []
    for start in range(0, max(len(records), 1), records_a_segment):
        head = SegmentHead(kind=kind, epoch=1, first=first_offset, created_at_ms=created_at_ms)
        path = folder / f"{name}-{first_number + len(paths):012d}.segment"
        path.write_bytes(head.encode())
        append(path, records[start : start + records_a_segment])
        paths.append(path)
        first_offset += path.stat().st_size - SEGMENT_HEAD_BYTES
    return paths


def append_actions(path: Path, records: Sequence[object], *, together: bool = False) -> None:
    """Append actions to a file that is whole, each in a block of its own, or all in one."""
    groups = [records] if together else [[record] for record in records]
    append_blocks(path, [(_framed(some), max(getattr(record, "at_ms", 0) for record in some)) for some in groups])


def append_blocks(path: Path, blocks: Sequence[tuple[Framed, int]]) -> None:
    """Append blocks to a file that is whole: the frames of each, and when it is stored."""
    data = path.read_bytes()
    end = decode_segment_head(data).first + len(data) - SEGMENT_HEAD_BYTES
    *_, before = [None, *blocks_in(path)]
    frames_before = 0 if before is None else len(before.frames)
    with path.open("ab") as file:
        for frames, at_ms in blocks:
            written = file.write(block_of(frames, offset=end, durable=0, at_ms=at_ms, frames_before=frames_before))
            end, frames_before = end + written, len(frames)


def _framed(records: Sequence[object]) -> Framed:
    frames, copies = framed_changes([encode_record(record) for record in records])
    frames.extend(copies)
    return frames
