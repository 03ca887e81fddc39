"""The pytest plugin `outbox`: fixtures for tests of services that publish and consume. Only pytest imports it.

What holds: this process sends nothing that the code under test commits, whatever broker its configuration names, and
nobody else does: its rows get the state `held`, which no sender and no compensator selects. In-memory brokers do get
messages, and so does any broker in a test that requests the fixture `outbox_sends`, or in all tests with
`outbox_sends = true` in pytest's configuration.

What does not hold: processes that the tests start are not bound (only this one has the plugin), and neither is code
that publishes before the plugin is loaded or by a broker's own client. A table that tests share with a service gets
their rows, held; `outbox messages discard` removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from outbox.producer.sender import sending_only_to
from outbox.testing.advancing_clock import AdvancingClock
from outbox.testing.capture import Capture, capturing
from outbox.testing.consumer_driver import ConsumerRun
from outbox.testing.memory_broker_port import MemoryBroker, OutageControl, open_memory_broker
from outbox.testing.published import PublishedMessages
from outbox_core.messages.broker_port import Broker

_SENDS = "outbox_sends"
_send_requests: list[object] = []
"""One entry for each test, or wider scope, that requests sends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting for test suites that use a real broker throughout."""
    parser.addini(_SENDS, "send what tests commit to the broker that the Outbox names", type="bool", default=False)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say first what the plugin does to what tests commit."""
    if config.getini(_SENDS):
        return "outbox: what tests commit is sent (outbox_sends = true)"
    return "outbox: what this process commits is held and never sent; processes that it starts are not bound"


def pytest_configure(config: pytest.Config) -> None:
    """Block sends, from the import of the first conftest.py to the end."""
    if not config.getini(_SENDS):
        held_back = ExitStack()
        held_back.enter_context(sending_only_to(_is_for_tests))
        config.add_cleanup(held_back.close)


@pytest.fixture
def outbox_sends() -> Iterator[None]:
    """Committed messages are sent during this test, as in production, to the broker that the Outbox names."""
    request = object()
    _send_requests.append(request)
    yield
    _send_requests.remove(request)


@pytest.fixture
def outbox_clock() -> AdvancingClock:
    """The running clock of `outbox_broker`; `outbox_clock.advance(timedelta(hours=2))` advances it."""
    return AdvancingClock()


@pytest.fixture
def outbox_broker(outbox_clock: AdvancingClock) -> Iterator[MemoryBroker]:
    """An in-memory broker for this test only, opened at its first use. Requires the extra `testing`."""
    broker = open_memory_broker(clock=outbox_clock)
    yield broker
    broker.close()


@pytest.fixture
def published(outbox_capture: Capture) -> PublishedMessages:
    """The messages that this test's transactions have committed, by any Outbox, session, thread or task."""
    return outbox_capture.published


@pytest.fixture
def outbox_run(outbox_capture: Capture, outbox_broker: MemoryBroker) -> ConsumerRun:
    """Runs consumers on the test's published messages until none is due: `outbox_run([issue_ticket])`."""
    return ConsumerRun(capture=outbox_capture, broker=outbox_broker)


@pytest.fixture
def outbox_capture() -> Iterator[Capture]:
    """The capture that `published` and `outbox_run` share; tests use those."""
    with capturing() as capture:
        yield capture


def _is_for_tests(broker: Broker) -> bool:
    return bool(_send_requests) or isinstance(broker, OutageControl)
