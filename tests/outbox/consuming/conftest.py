"""Brokers to watch, in real and in manual time, and runners that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox import Consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.testing import AdvancingClock
from outbox_core import ManualClock
from outbox_core.common.backoff import Backoff
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker

SHORT = Backoff(initial_ms=1, max_ms=2)


@pytest.fixture
def ahead() -> AdvancingClock:
    """The watched broker's and its consumers' clock: it runs, and can be put forward."""
    return AdvancingClock()


@pytest.fixture
def watched(tmp_path: Path, ahead: AdvancingClock) -> Iterator[WatchedBroker]:
    """A broker to watch."""
    broker = WatchedBroker(tmp_path / "watched", clock=ahead)
    yield broker
    broker.close()


@pytest.fixture
def timed(tmp_path: Path, clock: ManualClock) -> Iterator[WatchedBroker]:
    """A broker whose time moves when the test says so."""
    broker = WatchedBroker(tmp_path / "timed", clock=clock)
    yield broker
    broker.close()


@pytest.fixture
def running(watched: WatchedBroker, ahead: AdvancingClock) -> Iterator[Callable[..., ConsumerRunner]]:
    """Starts consumers on the watched broker; they are stopped at the end of the test."""
    runners: list[ConsumerRunner] = []

    def start(*consumers: Consumer, **options: Any) -> ConsumerRunner:
        runners.append(ConsumerRunner(consumers, broker=watched, **{"clock": ahead, "pauses": SHORT, **options}))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        assert runner.stop(timeout_seconds=WAIT_SECONDS)
