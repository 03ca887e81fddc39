"""The pytest plugin `outbox`: fixtures for tests of services that publish and consume. Loaded by pytest alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox.testing.advancing_clock import AdvancingClock
from outbox.testing.capture import Capture, capturing
from outbox.testing.memory_broker import MemoryBroker
from outbox.testing.published import Published
from outbox.testing.running import ConsumerRun


@pytest.fixture
def outbox_clock() -> AdvancingClock:
    """The clock of `outbox_broker`: it runs, and `outbox_clock.advance(timedelta(hours=2))` puts it forward."""
    return AdvancingClock()


@pytest.fixture
def outbox_broker(outbox_clock: AdvancingClock) -> Iterator[MemoryBroker]:
    """An in-memory broker of this test's own."""
    broker = MemoryBroker(clock=outbox_clock)
    yield broker
    broker.close()


@pytest.fixture
def published(outbox_capture: Capture) -> Published:
    """What the transactions of this test have committed, by whatever Outbox, session, thread or task."""
    return outbox_capture.published


@pytest.fixture
def outbox_run(outbox_capture: Capture, outbox_broker: MemoryBroker) -> ConsumerRun:
    """Runs consumers on what the test has published until nothing is due: `outbox_run([issue_ticket])`."""
    return ConsumerRun(capture=outbox_capture, broker=outbox_broker)


@pytest.fixture
def outbox_capture() -> Iterator[Capture]:
    """What `published` and `outbox_run` share; tests use those."""
    with capturing() as capture:
        yield capture
