"""A delay service in front of a broker with tokens: what its token does not cover, and a token that is wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker_adapter.http import HttpBroker
from outbox_broker.delay_service.delay_proxy import DelayProxy
from outbox_broker.engine.engine import Engine
from outbox_broker.http.access_control import Access, load_tokens
from outbox_broker.http.broker_metrics import BrokerMetrics
from outbox_core import Message
from outbox_core.common.clock import ManualClock
from outbox_core.runtime.logs import event_name
from tests.broker_adapter.servers import serving
from tests.outbox_broker.delay.conftest import NOW_MS, Opened

TOKENS = """
[[tokens]]
name = "delay"
sha256 = "{digest}"
roles = ["publish"]
topics = ["a.*"]
"""
Fronted = Callable[[str], DelayProxy]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def target(tmp_path: Path, clock: ManualClock) -> Iterator[Engine]:
    """The engine behind the broker, to see what came."""
    engine = Engine.open(tmp_path / "target", clock=clock)
    yield engine
    engine.close()


@pytest.fixture
def fronted(target: Engine, opened: Opened, clock: ManualClock, tmp_path: Path) -> Iterator[Fronted]:
    """Make a front, not started, whose target is asked with a token; the right one covers `a.*`."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS.format(digest=hashlib.sha256(b"right").hexdigest()))
    with ExitStack() as stack:
        url = stack.enter_context(serving(target, access=Access(tokens=load_tokens(tokens)))).url

        def made(token: str) -> DelayProxy:
            broker = HttpBroker(url, token=token)
            stack.callback(broker.close)
            front = opened.front(broker, clock=clock)
            stack.callback(front.close)
            return front

        yield made


def publish(front: DelayProxy, *places: str) -> None:
    """Messages for now, each `topic/id`."""
    parts = [place.split("/") for place in places]
    front.publish([Message(id=message_id, topic=topic, body=b"x") for topic, message_id in parts])


def turned(front: DelayProxy) -> None:
    """Everything that can be done now."""
    while front.service.turn() == 0:
        pass


def came(target: Engine, topic: str) -> list[str]:
    return [one.id for one in target.puller.pull(topic, "g")]


def test_a_topic_that_the_token_does_not_cover_holds_up_no_other(
    fronted: Fronted, target: Engine, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    front = fronted("right")

    publish(front, "b.x/b1")
    turned(front)
    publish(front, "a.x/a1", "b.x/b2", "a.y/a2", "b.x/b3", "a.x/a3")
    turned(front)

    assert (came(target, "a.x"), came(target, "a.y"), came(target, "b.x")) == (["a1", "a3"], ["a2"], [])
    assert (front.service.delivered, front.service.refused, front.service.failures) == (3, 3, 0)
    assert front.counters()["fired", "a.x", ""] == 2
    assert ("fired", "b.x", "") not in front.counters()
    refusals = [one.__dict__ for one in caplog.records if event_name(one) == "delivery_deferred"]
    logged = [(one["first_message_id"], one["messages"]) for one in refusals]
    assert logged == [("b1", 1)], "a line for a topic and minute"
    found = front.scheduled_message("b2")
    assert found is not None
    assert found.keys() == {"id", "topic", "deliver_at_ms"}
    assert front.cancel(["b3"]) == ["canceled"]
    clock.advance(1_000)
    turned(front)
    assert front.service.refused == 5, "an operator can grant it: in a second"
    metrics = BrokerMetrics(front.served, series_max=10).registry
    deferred = [
        metrics.get_sample_value("broker_delay_deferred_messages_total", {"topic": topic}) for topic in ("b.x", "a.x")
    ]
    assert deferred == [5, None], "once for each try"


def test_a_token_that_is_wrong_holds_everything_until_it_is_mended(
    fronted: Fronted, target: Engine, clock: ManualClock
) -> None:
    front = fronted("wrong")
    publish(front, "a.x/a1", "a.y/a2")

    turned(front)
    front.close()
    clock.advance(60_000)
    turned(fronted("right"))

    assert (front.service.failures, front.service.refused) == (1, 0)
    assert (came(target, "a.x"), came(target, "a.y")) == (["a1"], ["a2"]), "nobody waits an hour for that"
