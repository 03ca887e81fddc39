"""The pytest plugin `outbox`: fixtures for tests of services that publish and consume. Loaded by pytest alone.

In a pytest that has it nothing that the code under test commits is sent by this process, to whatever broker its
configuration names: the rows stay in the test's database. A broker in memory gets its messages, and so does any broker
in a test that asks for the fixture `outbox_sends`, or everywhere by `outbox_sends = true` in pytest's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from outbox.producer.sender import sending_only_to
from outbox.testing.advancing_clock import AdvancingClock
from outbox.testing.capture import Capture, capturing
from outbox.testing.consumer_driver import ConsumerRun
from outbox.testing.memory_broker import MemoryBroker
from outbox.testing.published import Published
from outbox_core.messages.broker_port import Broker

_SENDS = "outbox_sends"
_asked: list[object] = []
"""Of each test, or wider scope, that asks for sends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The setting for suites of services that are tested with a real broker throughout."""
    parser.addini(_SENDS, "send what tests commit to the broker that the Outbox names", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Hold back what tests commit, from the import of the first conftest.py to the end."""
    if not config.getini(_SENDS):
        held_back = ExitStack()
        held_back.enter_context(sending_only_to(_is_for_tests))
        config.add_cleanup(held_back.close)


@pytest.fixture
def outbox_sends() -> Iterator[None]:
    """While this test runs what is committed is sent, as in production, to the broker that the Outbox names."""
    asked = object()
    _asked.append(asked)
    yield
    _asked.remove(asked)


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


def _is_for_tests(broker: Broker) -> bool:
    return bool(_asked) or isinstance(broker, MemoryBroker)
