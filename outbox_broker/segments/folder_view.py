"""Reads a folder's segments without owning it: changes nothing, takes no lock, and its owner may be writing.

A file may have been deleted by the time it is read, as its owner needed it no more: FileNotFoundError then.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox_broker.segments.local import (
    LOGS,
    SUFFIX,
    boot_id,
    head_of,
    is_unfinished,
    noted_blocks,
    refuse_if_newest_is_missing,
)
from outbox_broker.segments.port import SegmentInfo
from outbox_broker.segments.writer_epoch import EpochFile
from outbox_core.common.errors import ConfigurationError, StorageFailed
from outbox_core.journal.block import (
    SEGMENT_HEAD_BYTES,
    Block,
    SegmentRefused,
    decode_segment_head,
)
from outbox_core.journal.journal import SegmentDamaged
from outbox_core.journal.segment_note import read_note


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableSegment:
    """A file that is no segment for this version, and why."""

    name: str
    why: str


class FolderView:
    """A SegmentReader on the segments that a folder had when the view was made."""

    def __init__(self, folder: Path, *, boot: str | None = None) -> None:
        """Read the heads of all files. `boot`: the machine's boot_id(). Raises StorageFailed."""
        self._folder = folder
        self._boot = boot_id() if boot is None else boot
        self._infos: dict[str, SegmentInfo] = {}
        self.unreadable: list[UnreadableSegment] = []
        self.damaged_heads: set[str] = set()
        """Segments whose heads are damaged; what is known of them is what their blocks say."""
        self.missing: str | None = None
        """Why an opening refuses the folder: a log's newest segment is gone."""
        self.unfinished: list[str] = []
        """Segments without a block: their owner died as it made them, or makes them now."""
        try:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                self._find(path)
            refuse_if_newest_is_missing(folder)
        except SegmentDamaged as error:
            self.missing = str(error)
        except OSError as error:
            raise StorageFailed(f"cannot read {folder}: {error.strerror}") from error

    def list(self) -> Sequence[SegmentInfo]:
        """All files that have a head; see the port."""
        return list(self._infos.values())

    def size_bytes(self, name: str) -> int:
        """Returns how long a segment's file is now, without its head, which is damage or a torn tail behind the last
        block.
        """
        return max(0, self._path(name).stat().st_size - SEGMENT_HEAD_BYTES)

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        """Bytes of a file; see the port."""
        return self._read(name, position, size_bytes)

    def blocks(self, name: str, *, proven: int = 0, wanted: Container[int] | None = None) -> Iterator[Block]:
        """The blocks of a file as its next owner would find them; see the port. Only a log can have a torn tail in
        which whole blocks are: of a bucket, and of the id index, the log names what counts.
        """
        info, note = self._infos[name], read_note(self._path(name))
        data = self._read(name, 0, self.size_bytes(name))
        known = proven if info.kind in LOGS else len(data)
        return noted_blocks(data, note, first=info.first, proven=known, boot=self._boot, wanted=wanted)

    def _find(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                if is_unfinished(file):
                    self.unfinished.append(path.stem)
                    return
                file.seek(0)
                try:
                    decode_segment_head(file.read(SEGMENT_HEAD_BYTES))
                except SegmentRefused:
                    self.damaged_heads.add(path.stem)
                file.seek(0)
                head = head_of(path, file, is_owned=EpochFile(self._folder).identity() is not None)
        except FileNotFoundError:
            return  # deleted meanwhile
        except (ConfigurationError, PermissionError, SegmentDamaged) as error:
            self.damaged_heads.discard(path.stem)
            self.unreadable.append(UnreadableSegment(name=path.stem, why=str(error)))
            return
        if head is None:
            self.damaged_heads.discard(path.stem)
            why = "its first page is lost, and nothing in it was committed: an opening sets it aside"
            self.unreadable.append(UnreadableSegment(name=path.stem, why=why))
            return
        self._infos[path.stem] = SegmentInfo(
            name=path.stem, kind=head.kind, first=head.first, end=None, created_at_ms=head.created_at_ms,
            epoch=head.epoch,
        )  # fmt: skip

    def _read(self, name: str, position: int, size_bytes: int) -> bytes:
        try:
            with self._path(name).open("rb") as file:
                return os.pread(file.fileno(), size_bytes, SEGMENT_HEAD_BYTES + position)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageFailed(f"cannot read {name}: {error.strerror}") from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"
