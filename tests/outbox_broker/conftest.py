"""Engines on the folder of a test, or on ledgers in memory, closed when it ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import Storage
from outbox_broker.segments.port import Segments
from outbox_core.common.clock import ManualClock
from tests.outbox_broker.segments.ledger_cluster import LedgerCluster


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The engine's own tests run on ledgers, too, but for those that name its folder, or a storage that fails; or whose
    module says that it is of files.
    """
    if "medium" not in metafunc.fixturenames or "open_engine" not in metafunc.fixturenames:
        return
    is_engines_own = metafunc.module.__name__.count(".") == __name__.count(".")
    source = inspect.getsource(metafunc.function)
    is_of_files = getattr(metafunc.module, "IS_OF_FILES", False) or any(
        word in source for word in ("folder", "tmp_path", "storage")
    )
    on_ledgers = is_engines_own and not is_of_files
    metafunc.parametrize("medium", ["folder", "ledgers"] if on_ledgers else ["folder"], indirect=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data folder of this test."""
    return tmp_path / "data"


@pytest.fixture
def medium(request: pytest.FixtureRequest) -> Callable[[], Segments] | None:
    """Takes over what an engine's segments are on, if not on its folder: the ledgers of one shard, which outlive it."""
    return None if request.param == "folder" else LedgerCluster().open


@pytest.fixture
def open_engine(
    folder: Path, tmp_path: Path, clock: ManualClock, medium: Callable[[], Segments] | None
) -> Iterator[Callable[..., Engine]]:  # fmt: skip
    """Open an engine on the test's folder, by the test's clock, or on what is on ledgers, each in an empty folder; what
    was opened before is closed first.
    """
    with ExitStack() as stack:
        owners = 0

        def opened(*, storage: Storage | None = None, **options: Any) -> Engine:
            nonlocal owners
            stack.close()
            owners += 1
            taken = None if medium is None else medium()
            engine = Engine.open(
                folder if taken is None else tmp_path / f"owner-{owners}", clock=clock,
                options=EngineOptions(**options), storage=storage,
                segments=None if taken is None else lambda _part: taken,
            )  # fmt: skip
            stack.callback(engine.close)
            return engine

        yield opened


@pytest.fixture
def engine(open_engine: Callable[..., Engine]) -> Engine:
    """An engine on a fresh folder, or on ledgers."""
    return open_engine()
