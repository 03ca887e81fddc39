"""Engines on the folder of a test, closed when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import Storage
from outbox_core.common.clock import ManualClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data folder of this test."""
    return tmp_path / "data"


@pytest.fixture
def open_engine(folder: Path, clock: ManualClock) -> Iterator[Callable[..., Engine]]:
    """Open an engine on the test's folder, by the test's clock; what was opened before is closed first."""
    with ExitStack() as stack:

        def opened(*, storage: Storage | None = None, **options: Any) -> Engine:
            stack.close()
            engine = Engine.open(folder, clock=clock, options=EngineOptions(**options), storage=storage)
            stack.callback(engine.close)
            return engine

        yield opened


@pytest.fixture
def engine(open_engine: Callable[..., Engine]) -> Engine:
    """An engine on a fresh folder."""
    return open_engine()
