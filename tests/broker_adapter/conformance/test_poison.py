"""A message that a broker of ours refuses is refused alone; its neighbours are stored once, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from broker_adapter.http import HttpBroker
from outbox_broker.http.http_settings import HttpSettings
from outbox_core import Broker, Message
from outbox_core.common.clock import SystemClock
from outbox_core.messages.limits import DELAY_ACCEPTED_MS_MAX, DELAY_MAX_MS
from outbox_core.messages.message import PublishStatus
from outbox_core.messages.refused_batch_isolation import publish_isolated

LARGE_BYTES = 2_000
PLACES = pytest.mark.parametrize("place", [0, 4, 8], ids=["first", "middle", "last"])


@pytest.fixture(params=["msgpack", "json"])
def narrow(request: pytest.FixtureRequest, serve: Callable[[HttpSettings], str]) -> Iterator[Broker]:
    """A client of a server that takes small bodies only, and refuses a request with another."""
    with ExitStack() as stack:
        broker = HttpBroker(serve(HttpSettings(body_bytes_max=LARGE_BYTES - 1)), codec=request.param)
        stack.callback(broker.close)
        yield broker


def refused_alone(
    broker: Broker, topic: str, poison: Message, *, place: int, status: PublishStatus = PublishStatus.REJECTED
) -> str:
    """Publish it among others of its topic and of another; returns the reason."""
    other = f"{topic}.other"
    batch = [Message(id=f"m{n}", topic=other if n % 2 else topic, body=b"x") for n in range(9)]
    batch[place] = poison

    published = publish_isolated(broker.publish, batch)

    expected = [status if at == place else PublishStatus.STORED for at in range(9)]
    assert [published.results[at].status for at in range(9)] == expected
    for name in (topic, other):
        pulled = [delivery.id for delivery in broker.pull(name, "g")]
        assert pulled == [one.id for one in batch if one.topic == name and one is not poison]
    return str(published.results[place].error)


@PLACES
def test_a_due_time_that_is_too_far_ahead_is_refused_alone(broker: Broker, topic: str, place: int) -> None:
    due_ms = SystemClock().now_ms() + DELAY_ACCEPTED_MS_MAX + 3_600_000

    reason = refused_alone(broker, topic, Message(id="p", topic=topic, body=b"", deliver_at_ms=due_ms), place=place)

    assert "731 days" in reason


@PLACES
def test_a_delay_that_the_publisher_s_clock_allows_is_deferred_where_clocks_are_years_apart(
    broker: Broker, topic: str, place: int
) -> None:
    years_ahead_ms = SystemClock().now_ms() + 3 * DELAY_ACCEPTED_MS_MAX
    ahead = Message(
        id="p", topic=topic, body=b"", created_at_ms=years_ahead_ms, deliver_at_ms=years_ahead_ms + DELAY_MAX_MS
    )

    reason = refused_alone(broker, topic, ahead, place=place, status=PublishStatus.DEFERRED)

    assert "clocks" in reason


@PLACES
def test_a_body_that_is_too_large_for_a_server_is_refused_alone(narrow: Broker, topic: str, place: int) -> None:
    reason = refused_alone(narrow, topic, Message(id="p", topic=topic, body=b"x" * LARGE_BYTES), place=place)

    assert f"{LARGE_BYTES:,} bytes" in reason
