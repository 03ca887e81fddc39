"""What the logs of a data folder hold, and what of it is damaged: the decisions of `outbox broker log`. Reads only.

The owner may be writing meanwhile. What is behind the last whole block is a torn tail only if it stays so.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntFlag
from itertools import groupby
from pathlib import Path
from typing import Final, Protocol

from outbox_broker.journal.replay import JournalReplay
from outbox_broker.segments.folder_view import FolderView
from outbox_broker.segments.local import LOGS, SUFFIX
from outbox_broker.segments.port import SegmentInfo, SegmentReader
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import Block, FrameKind, SegmentRefused
from outbox_core.journal.checkpoint_parts import CheckpointParts
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.journal.segment_note import NOTE_SUFFIX

_LOG_NAME: Final = re.compile(r"(.+)-\d{12}")
_ALL_KINDS: Final = frozenset(FrameKind)
_LOOKS: Final = 4
"""At a torn tail of a segment that may be written to, so many times, before it counts as one."""
_LOOK_AGAIN_SECONDS: Final = 0.05
_ATTEMPTS: Final = 100
"""At a folder from which its owner deletes segments meanwhile."""
_DAMAGE_MAX: Final = 1_000
"""Damaged places that are told of one segment; all are counted."""


class LogStatus(IntFlag):
    """The exit status, as that of fsck: the sum of what applies."""

    CLEAN = 0
    TORN_TAIL = 1
    """Of which nothing was acknowledged: the next opening cuts it."""
    DAMAGED = 4
    UNREADABLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A place in a segment that is not as it was written. `position` counts from behind the segment's head."""

    position: int
    size_bytes: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReport:
    """One segment. `first` and `end`: offsets of its log, or positions. `blocks`: how many, by the kind of the first
    frame; `frames`: all of them, damaged ones too. `tail_bytes`: behind the last whole block.
    """

    name: str
    kind: str
    epoch: int
    created_at_ms: int
    first: int
    end: int
    blocks: dict[str, int]
    frames: int
    damaged_places: int
    damage: Sequence[Damage]
    tail_bytes: int

    @property
    def status(self) -> LogStatus:
        """What is wrong with it."""
        found = LogStatus.DAMAGED if self.damaged_places else LogStatus.CLEAN
        return found | LogStatus.TORN_TAIL if self.tail_bytes else found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """A checkpoint of which a part was found. `captured`: the offset from which on is replayed if it counts."""

    captured: int
    parts: int
    size_bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """One log. `replayed_from`: the offset from which on an opening reads it. `refused`: why an opening refuses it.
    `unacknowledged`: a segment behind the torn tail of the one before, which the next opening removes, too.
    """

    name: str
    end: int
    durable: int
    replayed_from: int
    segments: Sequence[SegmentReport]
    checkpoints: Sequence[CheckpointReport]
    refused: str | None = None
    unacknowledged: str | None = None

    @property
    def status(self) -> LogStatus:
        """What is wrong with it."""
        found = LogStatus.CLEAN if self.refused is None else LogStatus.DAMAGED
        found |= LogStatus.CLEAN if self.unacknowledged is None else LogStatus.TORN_TAIL
        for segment in self.segments:
            found |= segment.status
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """Segments of one owner: logs, and other segments, whose contents the log names. `unfinished`: without a block."""

    store: str
    logs: Sequence[LogReport]
    others: Sequence[SegmentReport] = ()
    unfinished: Sequence[str] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why, by name."""
    missing: str | None = None
    """Why an opening refuses the store: a log's newest segment is gone."""

    @property
    def status(self) -> LogStatus:
        """What is wrong with it."""
        found = LogStatus.UNREADABLE if self.unreadable else LogStatus.CLEAN
        found |= LogStatus.CLEAN if self.missing is None else LogStatus.DAMAGED
        for log in self.logs:
            found |= log.status
        for segment in self.others:
            found |= segment.status
        return found

    def faults(self) -> set[str]:
        """Returns what is wrong with it, to be compared."""
        logs = [(log.name, log.refused, log.unacknowledged) for log in self.logs if log.status]
        segments = [*(segment for log in self.logs for segment in log.segments), *self.others]
        damaged = [(segment.name, segment.damage, segment.tail_bytes) for segment in segments if segment.status]
        return set(map(str, [self.missing, *self.unreadable.items(), *logs, *damaged]))


class SegmentView(SegmentReader, Protocol):
    """What is read: a SegmentReader, and what else is known of segments in a medium that can have torn tails."""

    @property
    def damaged_heads(self) -> set[str]:
        """Segments whose heads are damaged."""

    def size_bytes(self, name: str) -> int:
        """Returns how long a segment is now, with what is behind its last whole block."""


def report_folder(folder: Path) -> list[StoreReport]:
    """Returns a report of each store in a folder: of a broker's data folder, or of the folder of one log. Raises
    StorageFailed if there is none, or it cannot be read.
    """
    found: list[StoreReport] = []
    try:
        folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
        for one in folders:
            name = "." if one == folder else one.name
            if any(one.glob(f"*{SUFFIX}")) or any(one.glob(f"*{NOTE_SUFFIX}")):
                found.append(_report_settled(one, store=name))
    except OSError as error:
        raise StorageFailed(f"cannot read {folder}: {error.strerror}") from error
    if not found:
        raise StorageFailed(f"{folder} holds no log: name the data folder of a broker, or of a delay service")
    return found


def report_segments(view: FolderView, *, store: str) -> StoreReport:
    """Returns the report of one owner's segments. Raises FileNotFoundError if one of a log was deleted that counted
    when the view was made.
    """
    infos = view.list()
    unreadable = {one.name: one.why for one in view.unreadable}
    names = {_log_of(info) for info in infos if info.kind in LOGS}
    replays = {log: _replay(view, log) for log in sorted(names)}  # first, before the owner deletes more
    logs: list[LogReport] = []
    others: list[SegmentReport] = []
    for log, segments in groupby(sorted(infos, key=lambda info: (_log_of(info), info.name)), key=_log_of):
        if log in names:
            logs.append(_report_log(view, list(segments), replay=replays[log], name=log))
            continue
        for info in segments:
            with suppress(FileNotFoundError):  # its owner needed it no more
                others.append(_report_segment(view, info, limit=None))
    return StoreReport(
        store=store, logs=logs, others=others, unfinished=view.unfinished, unreadable=unreadable,
        missing=view.missing,
    )  # fmt: skip


def _log_of(info: SegmentInfo) -> str:
    matched = _LOG_NAME.fullmatch(info.name)
    return matched[1] if matched else ""


def _report_settled(folder: Path, *, store: str) -> StoreReport:
    """Returns a report whose faults were there at two looks, one after the other. While the owner rolls, a listing can
    miss a file that was there before another one that it has.
    """
    report = _report_view(folder, store=store)
    for _ in range(_LOOKS):
        if not report.status:
            break
        before, report = report, _report_view(folder, store=store)
        if report.faults() == before.faults():
            break
    return report


def _report_view(folder: Path, *, store: str) -> StoreReport:
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError):  # its owner needed it no more
            return report_segments(FolderView(folder), store=store)
    return report_segments(FolderView(folder), store=store)


def _replay(view: SegmentView, log: str) -> JournalReplay | str:
    """Returns what an opening would find, or why it would refuse the log."""
    try:
        replay = JournalReplay(view, log, has_checkpoints=log != "messages")
        # Messages are opened whatever is lost of them; the actions, too: what they may have delivered comes again.
        for _ in replay.blocks(_ALL_KINDS, may_lose_changes=log == "actions") if log != "messages" else ():
            pass
    except (SegmentDamaged, SegmentRefused) as error:
        return str(error)
    return replay


def _report_log(
    view: SegmentView, infos: Sequence[SegmentInfo], *, replay: JournalReplay | str, name: str
) -> LogReport:
    found = None if isinstance(replay, str) else replay
    removed = None if found is None or found.unacknowledged is None else found.unacknowledged.name
    infos = [info for info in infos if info.name != removed]
    checkpoints: dict[int, CheckpointParts] = {}
    segments: list[SegmentReport] = []
    for info, following in zip(infos, [*infos[1:], None], strict=True):
        limit = None if following is None or following.first < info.first else following.first - info.first
        with suppress(FileNotFoundError):  # dropped
            segments.append(_report_segment(view, info, limit=limit, checkpoints=checkpoints))
    checkpoint = None if found is None else found.checkpoint
    return LogReport(
        name=name,
        end=infos[-1].first if found is None else found.end,
        durable=0 if found is None else found.durable,
        replayed_from=infos[0].first if checkpoint is None else checkpoint.captured,
        segments=segments,
        checkpoints=[_report_checkpoint(at, checkpoints[at]) for at in sorted(checkpoints)],
        refused=replay if isinstance(replay, str) else None,
        unacknowledged=removed,
    )


def _report_checkpoint(captured: int, parts: CheckpointParts) -> CheckpointReport:
    whole = parts.newest_whole()
    return CheckpointReport(
        captured=captured, parts=len(parts), size_bytes=parts.size_bytes_from(captured), is_whole=whole is not None
    )  # fmt: skip


def _report_segment(
    view: SegmentView, info: SegmentInfo, *, limit: int | None, checkpoints: dict[int, CheckpointParts] | None = None
) -> SegmentReport:
    """`limit`: the position at which the log goes on in the next segment; None if nothing says where this ends."""
    scanned = _scan(view, info, limit=limit)
    if limit is None:
        for _ in range(_LOOKS - 1):
            if not scanned.tail_bytes:
                break
            threading.Event().wait(_LOOK_AGAIN_SECONDS)  # its owner may be within a write
            before, scanned = scanned, _scan(view, info, limit=None)
            if scanned.end > before.end:
                scanned.tail_bytes = 0
    if checkpoints is not None:
        for captured, parts in scanned.checkpoints.items():
            checkpoints.setdefault(captured, CheckpointParts()).update(parts)
    if info.name in view.damaged_heads:
        scanned.damage.insert(0, Damage(position=0, size_bytes=0, what="the head of the segment"))
    return SegmentReport(
        name=info.name, kind=info.kind.name.lower(), epoch=info.epoch, created_at_ms=info.created_at_ms,
        first=info.first, end=info.first + scanned.end, blocks=dict(scanned.blocks), frames=scanned.frames,
        damaged_places=len(scanned.damage), damage=scanned.damage[:_DAMAGE_MAX], tail_bytes=scanned.tail_bytes,
    )  # fmt: skip


@dataclass(slots=True)
class _Scanned:
    """What one pass over a segment found. `end`: the position behind the last block."""

    end: int = 0
    tail_bytes: int = 0
    frames: int = 0
    blocks: Counter[str] = field(default_factory=Counter)
    damage: list[Damage] = field(default_factory=list)
    checkpoints: dict[int, CheckpointParts] = field(default_factory=dict)


def _scan(view: SegmentView, info: SegmentInfo, *, limit: int | None) -> _Scanned:
    scanned = _Scanned()
    last: Block | None = None
    for block in view.blocks(info.name, proven=limit or 0):
        if limit is not None and block.position >= limit:
            break  # of an append that failed halfway, before the next segment was begun
        last = block
        scanned.end = block.end if limit is None else min(block.end, limit)
        scanned.blocks[_kind_name(block.kind)] += 1
        scanned.frames += len(block.frames) + (block.damaged or 0)
        if block.damaged != 0 or block.at_ms is None:
            scanned.damage.append(_damage(block))
        if block.kind == FrameKind.CHECKPOINT:
            parts = CheckpointParts()
            parts.add(block.frames)
            for captured in parts.captured_behind(-1):
                scanned.checkpoints.setdefault(captured, CheckpointParts()).update(parts)
    size_bytes = view.size_bytes(info.name)
    if limit is not None:
        end = min(scanned.end, size_bytes)
        if end < limit:
            what = "it ends before the next one begins"
            scanned.damage.append(Damage(position=end, size_bytes=limit - end, what=what))
    elif last is not None and last.damaged is None and last.end >= size_bytes and info.kind not in LOGS:
        # A flush that did not end leaves a part of a block in a bucket: nothing names it.
        scanned.damage.pop()
        scanned.end, scanned.tail_bytes = last.position, last.end - last.position
    else:
        scanned.tail_bytes = max(0, size_bytes - scanned.end)
    return scanned


def _damage(block: Block) -> Damage:
    if block.damaged is None:
        what = "the head of a block, and an unknown number of its frames"
    elif block.at_ms is None:
        what = f"the head of a block, and {block.damaged} of its frames"
    else:
        what = f"{block.damaged} of {len(block.frames) + block.damaged} frames"
    return Damage(position=block.position, size_bytes=block.end - block.position, what=what)


def _kind_name(kind: int | None) -> str:
    return "unknown" if kind is None or kind not in _ALL_KINDS else FrameKind(kind).name.lower()


# -- as text -----------------------------------------------------------------------------------------------------------


def lines_of(report: StoreReport) -> Iterator[str]:
    """Yields a report as lines for people."""
    for log in report.logs:
        yield f"{report.store}: log {log.name}, {log.replayed_from:,} to {log.end:,} replayed by an opening"
        yield from (f"  {_line_of(segment)}" for segment in log.segments)
        for checkpoint in log.checkpoints:
            state = "whole" if checkpoint.is_whole else "NOT WHOLE"
            parts = f"{checkpoint.parts:,} part{'s' * (checkpoint.parts != 1)}, {checkpoint.size_bytes:,} bytes"
            yield f"  checkpoint at {checkpoint.captured:,}: {parts}, {state}"
        if log.unacknowledged is not None:
            yield f"  {log.unacknowledged}: nothing in it was acknowledged, the next opening removes it"
        if log.refused is not None:
            yield f"  AN OPENING REFUSES IT: {log.refused}"
    if report.others:
        size_bytes = sum(segment.end - segment.first for segment in report.others)
        yield f"{report.store}: {len(report.others):,} segments of buckets and of the id index, {size_bytes:,} bytes"
        yield from (f"  {_line_of(segment)}" for segment in report.others if segment.status)
    yield from (f"{report.store}: {name} has no block yet" for name in report.unfinished)
    yield from (f"{report.store}: CANNOT READ {name}: {why}" for name, why in report.unreadable.items())
    if report.missing is not None:
        yield f"{report.store}: AN OPENING REFUSES IT: {report.missing}"
    for segment in (*(segment for log in report.logs for segment in log.segments), *report.others):
        yield from _faults_of(report.store, segment)


def _line_of(segment: SegmentReport) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(segment.blocks.items()))
    held = f"{sum(segment.blocks.values()):,} blocks ({kinds}), " if kinds else ""
    return (
        f"{segment.name} {segment.kind}, epoch {segment.epoch}, {segment.first:,} to {segment.end:,}: "
        f"{held}{segment.frames:,} frames"
    )


def _faults_of(store: str, segment: SegmentReport) -> Iterator[str]:
    where = f"{store}/{segment.name}"
    for damage in segment.damage:
        yield f"{where}: DAMAGED at {damage.position:,}, {damage.size_bytes:,} bytes: {damage.what}"
    if segment.damaged_places > len(segment.damage):
        yield f"{where}: {segment.damaged_places - len(segment.damage):,} more damaged places"
    if segment.tail_bytes:
        end = segment.end - segment.first
        yield f"{where}: torn tail of {segment.tail_bytes:,} bytes at {end:,}: the next opening cuts it"
