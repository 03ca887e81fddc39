"""The media of segments, which outlive the owners that tests open on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outbox_broker.segments.local import LocalSegments
from outbox_broker.segments.port import Segments
from tests.outbox_broker.failing_storage import FailingStorage
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster
from tests.outbox_broker.segments.memory_segments import MemoryMedium
from tests.outbox_broker.segments.written_log import Medium


class LocalMedium:
    """A folder. Its lock does not hold, as on a shared disk: an owner learns of its successor by the epoch alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = FailingStorage(within=folder.name)
        self._opened: list[LocalSegments] = []

    def open(self) -> Segments:
        with suppress(FileNotFoundError):
            (self.folder / "lock").unlink()
        self._opened.append(LocalSegments.open(self.folder, storage=self.storage))
        return self._opened[-1]

    def path(self, name: str = "a") -> Path:
        return self.folder / f"{name}.segment"

    def end(self) -> None:
        """Close what the tests left open."""
        for segments in self._opened:
            segments.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalMedium]:
    """A folder that is not there yet."""
    medium = LocalMedium(tmp_path / "segments")
    yield medium
    medium.end()


@pytest.fixture
def ledgers() -> LedgerCluster:
    """Ledgers in memory, and a shard of a cluster on them."""
    return LedgerCluster()


@pytest.fixture
def memory() -> MemoryMedium:
    """The model."""
    return MemoryMedium()


@pytest.fixture(params=["ledgers", "local", "memory"])
def medium(request: pytest.FixtureRequest) -> Medium:
    """Each medium that segments are on."""
    found: Medium = request.getfixturevalue(request.param)
    return found
