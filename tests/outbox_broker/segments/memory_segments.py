"""A model of segments in memory: what outlives their owners, and what a kill or a full disk does to it."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outbox_broker.segments.port import SegmentInfo, WriterFenced, require_name
from outbox_core.common.errors import StorageFailed
from outbox_core.journal.block import Block, SegmentKind, scan
from tests.outbox_broker.delay.failing_disk import Killed


@dataclass(slots=True)
class Faults:
    """`room_bytes`: what may be written yet, None for any. `calls_left`: until the process is killed, instead of the
    call; None: it is not. `commits_fail`: the medium does not confirm.
    """

    room_bytes: int | None = None
    calls_left: int | None = None
    commits_fail: bool = False


@dataclass(slots=True)
class _Stored:
    info: SegmentInfo
    data: bytearray = field(default_factory=bytearray)
    durable: int = 0


class MemoryMedium:
    """What outlives every owner. A seed decides what a kill keeps of what was not committed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.faults = Faults()
        self.segments: dict[str, _Stored] = {}
        self.epoch = 0

    def open(self) -> MemorySegments:
        """Become the owner."""
        self.count()
        self.epoch += 1
        return MemorySegments(self)

    def kill(self) -> None:
        """As a power loss: of what was not committed an arbitrary prefix is there."""
        for stored in self.segments.values():
            del stored.data[self.random.randint(stored.durable, len(stored.data)) :]
        for name in [name for name, stored in self.segments.items() if not stored.data]:
            del self.segments[name]

    def flip(self, name: str, position: int) -> None:
        """Flip a bit."""
        self.segments[name].data[position] ^= 1

    def count(self, size_bytes: int = 0) -> None:
        """Count a call, and what it writes. Raises Killed instead of it; StorageFailed."""
        faults = self.faults
        if faults.calls_left is not None:
            if faults.calls_left <= 0:
                raise Killed
            faults.calls_left -= 1
        if faults.room_bytes is not None and size_bytes:
            if size_bytes > faults.room_bytes:
                raise StorageFailed("No space left on device; free some disk space")
            faults.room_bytes -= size_bytes


class MemorySegments:
    """Segments of one owner."""

    def __init__(self, medium: MemoryMedium) -> None:
        """Called by MemoryMedium.open() only."""
        self.medium = medium
        self.epoch = medium.epoch
        self.failure: str | None = None
        self.is_closed = False

    def create(self, name: str, *, kind: SegmentKind, first: int = 0) -> MemoryWriter:
        require_name(name)
        self.refuse_if_unable()
        self.medium.segments.pop(name, None)
        info = SegmentInfo(name=name, kind=kind, first=first, end=None, created_at_ms=0, epoch=self.epoch)
        return MemoryWriter(self, _Stored(info))

    def reopen(self, name: str, *, end: int) -> MemoryWriter | None:
        self.refuse_if_unable()
        self.medium.count()
        stored = self.medium.segments[name]
        del stored.data[end:]
        stored.durable = end
        stored.info = replace(stored.info, end=None)  # of a sealed one it is known, until it is gone on with
        return MemoryWriter(self, stored)

    def list(self) -> Sequence[SegmentInfo]:
        return [self.medium.segments[name].info for name in sorted(self.medium.segments)]

    def read(self, name: str, position: int, size_bytes: int) -> bytes:
        return bytes(self._known(name).data[position : position + size_bytes])

    def blocks(self, name: str, *, proven: int = 0, wanted: Container[int] | None = None) -> Iterator[Block]:
        stored = self._known(name)
        first = stored.info.first
        proven = first + max(proven, stored.durable)
        return scan(bytes(stored.data), first=first, proven=proven, same_boot=True, wanted=wanted)

    def delete(self, names: Iterable[str]) -> None:
        self.refuse_if_unable()
        for name in names:
            self.medium.count()
            self.medium.segments.pop(name, None)

    def check(self) -> None:
        self.refuse_if_unable()

    def close(self) -> None:
        self.is_closed = True

    def refuse_if_unable(self) -> None:
        if self.is_closed:
            raise StorageFailed("the segments are closed")
        if self.epoch != self.medium.epoch:
            raise WriterFenced("another process writes now")
        if self.failure is not None:
            raise StorageFailed(self.failure)

    def _known(self, name: str) -> _Stored:
        if self.is_closed:
            raise StorageFailed("the segments are closed")
        if name not in self.medium.segments:
            raise StorageFailed(f"cannot read {name}: there is no such segment")
        return self.medium.segments[name]


class MemoryWriter:
    """The end of one segment."""

    def __init__(self, segments: MemorySegments, stored: _Stored) -> None:
        """Called by MemorySegments only."""
        self._segments = segments
        self._stored = stored
        self._is_done = False

    @property
    def name(self) -> str:
        return self._stored.info.name

    @property
    def end(self) -> int:
        return len(self._stored.data)

    def append(self, block: bytes) -> int:
        self._segments.refuse_if_unable()
        if self._is_done or (self._stored.data and not self._is_there()):
            raise StorageFailed(f"{self.name} is sealed, or was deleted")
        self._segments.medium.count(len(block))
        self._stored.data += block
        self._segments.medium.segments[self.name] = self._stored
        return self.end

    def commit(self, end: int | None = None) -> int:
        self._segments.refuse_if_unable()
        if self._is_there():
            self._segments.medium.count()
            if self._segments.medium.faults.commits_fail:
                self._segments.failure = "the medium did not confirm"
                raise StorageFailed(self._segments.failure)
            self._stored.durable = self.end
        return self._stored.durable

    def cut(self, end: int) -> None:
        self._segments.medium.count()
        del self._stored.data[end:]
        self._stored.durable = min(self._stored.durable, end)

    def seal(self) -> None:
        durable = self.commit()
        self._is_done = True
        self._stored.info = replace(self._stored.info, end=durable)

    def abandon(self) -> None:
        self._is_done = True

    def _is_there(self) -> bool:
        return self._segments.medium.segments.get(self.name) is self._stored
