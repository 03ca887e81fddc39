"""@consumer declares the group that its handler needs, and is told of an order that it would lose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox import (
    Backoff,
    Broker,
    ConfigurationError,
    Consumer,
    InvalidMessage,
    NotSupported,
    Outbox,
    connect,
    consumer,
)
from outbox import run_consumers as run
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.testing import ConsumerRun
from outbox_core import Delivery, GroupConfig
from outbox_core.messages.broker_port import Capability
from outbox_core.runtime.logs import event_name
from tests.broker_adapter.servers import served
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker, message
from tests.outbox_broker.polling import until

Running = Callable[..., ConsumerRunner]
Handler = Callable[[Delivery], None]


def nothing(_one: Delivery) -> None:
    """Handle it."""


def config_of(broker: Broker, topic: str = "orders", group: str = "g") -> GroupConfig | None:
    found: GroupConfig | None = broker.admin.group_config(topic, group)  # type: ignore[attr-defined]
    return found


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[Any]:
    return [record for record in caplog.records if event_name(record) == name]


@pytest.fixture(params=["embedded", "http"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    """Our broker, in this process and over HTTP."""
    with ExitStack() as stack:
        folder = tmp_path / "broker"
        url = f"embedded:{folder}" if request.param == "embedded" else stack.enter_context(served(folder)).url
        yield stack.enter_context(closing(connect(url)))


@contextmanager
def consuming(made: Consumer, broker: Broker) -> Iterator[ConsumerRunner]:
    runner = run([made], broker=broker)
    yield runner
    assert runner.stop(timeout_seconds=WAIT_SECONDS)


def test_a_group_that_is_not_there_is_declared_as_its_consumer_says(broker: Broker) -> None:
    topic = f"orders-{datetime.now(UTC).timestamp()}"
    made = consumer(
        topic, group="g", ordered=True, max_attempts=7, filter="region = 'eu'", start="latest",
        backoff=Backoff(initial_ms=5, multiplier=3, max_ms=50),
    )(nothing)  # fmt: skip

    with consuming(made, broker):
        found = config_of(broker, topic)

    assert found is not None
    assert (found.ordered, found.max_attempts, found.filter) == (True, 7, "region = 'eu'")
    assert (found.backoff_initial_ms, found.backoff_multiplier, found.backoff_max_ms) == (5, 3, 50)


def test_what_is_not_there_is_none(broker: Broker) -> None:
    assert config_of(broker, "never-published") is None


def test_a_consumer_that_says_nothing_declares_nothing(watched: WatchedBroker) -> None:
    with consuming(consumer("orders", group="g")(nothing), watched):
        assert config_of(watched) in (None, GroupConfig())


def test_handlers_of_an_ordered_group_see_the_order_of_commits_through_a_failure(
    sqlite_shop: Shop, watched: WatchedBroker, running: Running
) -> None:
    box: Outbox = sqlite_shop.box(watched, ordered={"orders"})
    for state in ("created", "paid", "canceled"):
        with box.begin():
            box.publish("orders", state, key="7")
    seen: list[bytes] = []
    failures = [RuntimeError("a hiccup")]

    @consumer("orders", group="projection", ordered=True, workers=3, backoff=Backoff(initial_ms=1, max_ms=2))
    def project(one: Delivery) -> None:
        if failures:
            raise failures.pop()
        seen.append(one.body)

    running(project)
    watched.wait_for(lambda: watched.acked == 3)

    assert seen == [b"created", b"paid", b"canceled"]


@pytest.mark.parametrize(
    ("stored", "said", "command"),
    [
        (GroupConfig(), {"ordered": True}, "outbox broker group declare orders g --ordered"),
        (GroupConfig(ordered=True), {"ordered": False}, "outbox broker group declare orders g --no-ordered"),
        (GroupConfig(), {"filter": "region = 'eu'"}, "declare orders g --filter 'region = '\"'\"'eu'\"'\"''"),
        (GroupConfig(filter="region = 'eu'"), {"filter": ""}, "outbox broker group declare orders g --filter ''"),
    ],
    ids=str,
)
def test_another_order_or_filter_is_refused_with_the_command_that_changes_it(
    watched: WatchedBroker, stored: GroupConfig, said: dict[str, Any], command: str
) -> None:
    watched.admin.declare_group("orders", "g", stored)

    with pytest.raises(ConfigurationError) as refused:
        run([consumer("orders", group="g", **said)(nothing)], broker=watched)

    assert command in str(refused.value)
    assert config_of(watched) == stored
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("consumer-g")] == []


def test_other_attempts_and_backoff_leave_what_is_stored_and_are_warned_of_once(
    watched: WatchedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    stored = GroupConfig(max_attempts=3, backoff_initial_ms=10, backoff_max_ms=20, ordered=True)
    watched.admin.declare_group("orders", "g", stored)
    made = consumer("orders", group="g", workers=4, max_attempts=9, backoff=Backoff(), ordered=True)(nothing)

    with consuming(made, watched):
        watched.publish([message()])
        watched.wait_for(lambda: watched.acked == 1)

    assert config_of(watched) == stored
    (record,) = events(caplog, "group_settings_differ")
    assert record.kept == [
        "max_attempts=3, not 9", "backoff=10 ms x 2 up to 20 ms, not 1000 ms x 2 up to 300000 ms"
    ]  # fmt: skip


def test_the_start_counts_for_a_new_group_alone(watched: WatchedBroker, running: Running) -> None:
    handled: list[str] = []
    watched.admin.declare_group("orders", "old", GroupConfig())
    watched.publish([message(1)])
    start = datetime.now(UTC) + timedelta(days=1)

    running(
        consumer("orders", group="old", start="latest")(lambda one: handled.append(f"old {one.id}")),
        consumer("orders", group="new", start="latest")(lambda one: handled.append(f"new {one.id}")),
        consumer("orders", group="at", start=start)(nothing),
    )
    watched.publish([message(2)])
    watched.wait_for(lambda: watched.acked == 4)  # "at" has no message of a later time to begin at, so it begins here

    assert sorted(handled) == ["new m-2", "old m-1", "old m-2"]


def test_a_consumer_that_starts_in_an_outage_declares_its_group_when_the_broker_is_back(
    watched: WatchedBroker, running: Running
) -> None:
    watched.settings_fail = 3
    watched.publish([message()])

    running(consumer("orders", group="g", ordered=True)(nothing))
    watched.wait_for(lambda: watched.acked == 1)

    found = config_of(watched)
    assert found is not None
    assert found.ordered


def test_a_refusal_that_is_found_when_the_broker_is_back_is_in_the_health_until_the_group_is_changed(
    watched: WatchedBroker, running: Running
) -> None:
    watched.admin.declare_group("orders", "g", GroupConfig())
    watched.settings_fail = 3
    watched.publish([message()])

    runner = running(consumer("orders", group="g", ordered=True)(nothing), consumer("bills", group="g")(nothing))
    until(lambda: not runner.health().healthy)
    [reason] = runner.health().reasons
    watched.admin.declare_group("orders", "g", GroupConfig(ordered=True))
    watched.wait_for(lambda: watched.acked == 1)

    assert "outbox broker group declare orders g --ordered" in reason
    assert runner.health().healthy


def test_a_group_that_was_deleted_is_declared_again(watched: WatchedBroker, running: Running) -> None:
    running(consumer("orders", group="g", ordered=True)(nothing))
    watched.publish([message(1)])
    watched.wait_for(lambda: watched.acked == 1)

    watched.admin.delete_group("orders", "g", force=True)
    watched.publish([message(2)])
    watched.wait_for(lambda: watched.acked >= 2)

    found = config_of(watched)
    assert found is not None
    assert found.ordered


class NoGroups(RecordingBroker):
    """A broker that delivers, and has no groups of ours."""

    capabilities: frozenset[Capability] = frozenset({Capability.PULL})


@pytest.mark.parametrize(
    "said",
    [{"ordered": True}, {"max_attempts": 3}, {"backoff": Backoff()}, {"filter": "a = 1"}, {"start": "latest"}],
    ids=str,
)
def test_a_broker_without_groups_of_ours_is_refused_in_words(said: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match="leave out ordered, max_attempts"):
        run([consumer("orders", group="g", **said)(nothing)], broker=NoGroups())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"max_attempts": 0}, InvalidMessage),
        ({"start": "yesterday"}, InvalidMessage),
        ({"start": datetime(2026, 1, 1)}, ConfigurationError),  # noqa: DTZ001 - that is what is refused
        ({"ordered": True, "broadcast": True}, ConfigurationError),
    ],
    ids=str,
)
def test_settings_that_no_group_can_have_are_refused_where_they_are_written(
    said: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        consumer("orders", group="g", **said)


def test_a_consumer_of_an_ordered_topic_that_does_not_say_its_order_is_warned_once(
    sqlite_shop: Shop, watched: WatchedBroker, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    box: Outbox = sqlite_shop.box(watched, ordered={"orders"})
    running(
        consumer("orders", group="silent", workers=2, prefetch=1)(nothing),
        consumer("orders", group="says-so", ordered=False)(nothing),
        consumer("orders", group="in-order", ordered=True)(nothing),
        consumer("bills", group="silent")(nothing),
    )
    for number in range(3):
        with box.begin():
            box.publish("orders", str(number), key="7")
            box.publish("bills", str(number), key="7")
    watched.wait_for(lambda: watched.acked == 12)

    (record,) = events(caplog, "order_not_kept_by_group")
    assert (record.topic, record.group) == ("orders", "silent")
    assert "ordered=True" in record.cure


def test_the_test_run_filters_as_the_group_would(sqlite_shop: Shop, outbox_run: ConsumerRun) -> None:
    box: Outbox = sqlite_shop.box("http://127.0.0.1:9", sender=NO_SENDER)
    with box.begin():
        box.publish("orders", "1", headers={"region": "eu"})
        box.publish("orders", "2", headers={"region": "us"})
    handled: list[bytes] = []

    outbox_run([consumer("orders", group="g", filter="region = 'eu'")(lambda one: handled.append(one.body))])

    assert handled == [b"1"]
