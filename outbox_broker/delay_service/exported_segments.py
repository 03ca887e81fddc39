"""Writes records as segments of a log, in the format of the broker's messages. Not durable: for readers here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outbox_core.common.private_files import write_private
from outbox_core.journal import journal
from outbox_core.journal.journal import SegmentHeader, SegmentKind

SEGMENT_BYTES_MAX: Final = 64 * 1024 * 1024


class ExportedSegments:
    """The segments of one log in an empty folder. Each append opens its file: appends are few and large."""

    def __init__(
        self, folder: Path, *, kind: SegmentKind, created_at_ms: int, segment_bytes_max: int = SEGMENT_BYTES_MAX
    ) -> None:
        """Make the folder and its first segment, which may stay empty."""
        self._folder = folder
        self._kind = kind
        self._created_at_ms = created_at_ms
        self._segment_bytes_max = segment_bytes_max
        self._first_offsets: list[int] = []
        self.end = 0
        folder.mkdir()
        self._begin_segment()

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write records at the end; a segment that is full is followed by another one."""
        if self.end - self._first_offsets[-1] >= self._segment_bytes_max:
            self._begin_segment()
        data, _ = journal.frames(payloads)
        with self._path().open("ab") as file:
            file.write(data)
        self.end += len(data)

    def rewind(self, end: int) -> None:
        """Remove all records behind an earlier end."""
        while self._first_offsets[-1] > end:
            self._path().unlink()
            self._first_offsets.pop()
        with self._path().open("r+b") as file:
            file.truncate(journal.HEADER_BYTES + end - self._first_offsets[-1])
        self.end = end

    def _begin_segment(self) -> None:
        self._first_offsets.append(self.end)
        header = SegmentHeader(kind=self._kind, first_offset=self.end, created_at_ms=self._created_at_ms)
        write_private(self._path(), header.encode())

    def _path(self) -> Path:
        return journal.segment_path(self._folder, self._first_offsets[-1])
