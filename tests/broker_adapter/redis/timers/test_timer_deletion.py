"""Deleting topics and groups of the timer store: a mistyped one keeps nothing, and the others lose nothing by it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from broker_adapter.redis.timers.slot_scripts import MOVES_MAX
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerRefused, InUse
from outbox_core.messages.broker_port import TopicAdmin
from outbox_core.runtime.command import main
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server

TOPIC = "orders"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that tests share; they keep apart by a prefix."""
    with redis_server() as running:
        yield running


@pytest.fixture(params=[1, 4], ids=["one slot", "slots"])
def url(request: pytest.FixtureRequest, server: RedisServer) -> str:
    """Of a store of the test's own."""
    prefix = uuid.uuid4().hex
    return f"redis://{HOST}:{server.port}/?store=timers&wait=0&prefix={prefix}:&slots={request.param}"


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    opened = connect(url)
    yield opened
    opened.close()


def admin_of(broker: Broker) -> TopicAdmin:
    admin = broker.admin
    assert isinstance(admin, TopicAdmin)
    return admin


def publish(broker: Broker, count: int) -> list[str]:
    ids = [f"m{number}" for number in range(count)]
    broker.publish([Message(id=one, topic=TOPIC, body=b"x") for one in ids])
    return ids


def pull(broker: Broker, group: str, *, count: int = 1_000) -> dict[str, str]:
    """Receipts by id."""
    pulled: dict[str, str] = {}
    while more := broker.pull(TOPIC, group, max_messages=min(count - len(pulled), 1_000) or 1):
        pulled |= {delivery.id: delivery.receipt for delivery in more}
        if len(pulled) >= count:
            break
    return pulled


def keys_of(server: RedisServer, url: str) -> set[str]:
    return {key.decode().removeprefix(prefix_of(url)) for key in server.ask("KEYS", f"{prefix_of(url)}*")}


def prefix_of(url: str) -> str:
    return url.partition("prefix=")[2].partition("&")[0] + "timers:"


def test_what_the_other_groups_acknowledged_goes_with_a_mistyped_group_and_what_they_need_stays(
    broker: Broker, server: RedisServer, url: str
) -> None:
    ids = publish(broker, 30)
    typo, first, second = (pull(broker, group) for group in ("typo", "first", "second"))
    broker.ack([typo[one] for one in ids[:10]])
    broker.nack([typo[one] for one in ids[10:15]], delay_ms=3_600_000)
    broker.ack([first[one] for one in ids[:20]])
    broker.ack([second[one] for one in ids[5:25]])

    admin_of(broker).delete_group(TOPIC, "typo", force=True)

    assert not [key for key in keys_of(server, url) if ":group:typo" in key]
    bodies = sum(server.ask("HLEN", f"{prefix_of(url)}{key}") for key in keys_of(server, url) if key.endswith(":body"))
    assert bodies == 15, "those that both others have acknowledged are gone"
    assert set(broker.ack([first[one] for one in ids[20:]])) == {"acked"}
    assert set(broker.ack([second[one] for one in [*ids[:5], *ids[25:]]])) == {"acked"}
    assert [key for key in keys_of(server, url) if key.endswith((":body", ":log", ":acks"))] == []


def test_what_a_third_group_needs_is_not_removed_by_an_acknowledgement_of_the_deleted_one(broker: Broker) -> None:
    [one] = publish(broker, 1)
    typo, first, _ = (pull(broker, group) for group in ("typo", "first", "second"))
    broker.ack([typo[one]])

    admin_of(broker).delete_group(TOPIC, "typo", force=True)
    broker.ack([first[one]])

    assert broker.admin.figures(TOPIC, "second")["in_flight"] == 1
    [delivery] = broker.pull(TOPIC, "third")
    assert delivery.id == one


def test_a_group_of_more_messages_than_one_part_is_deleted_and_messages_stay_for_a_group_to_come(
    broker: Broker,
) -> None:
    ids = publish(broker, 2 * MOVES_MAX + 3)
    pull(broker, "typo", count=MOVES_MAX)

    admin_of(broker).delete_group(TOPIC, "typo", force=True)

    assert broker.admin.figures(TOPIC)["in_flight"] == 0
    assert set(pull(broker, "right", count=len(ids))) == set(ids)
    with pytest.raises(BrokerRefused, match="no consumer group"):
        admin_of(broker).delete_group(TOPIC, "typo")


def test_what_is_in_use_is_deleted_by_force_alone(broker: Broker) -> None:
    publish(broker, 1)
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    broker.publish([Message(id="later", topic=TOPIC, body=b"", deliver_at_ms=due_ms)])
    pull(broker, "g")

    with pytest.raises(InUse, match="hold 1 messages"):
        admin_of(broker).delete_group(TOPIC, "g")
    with pytest.raises(InUse, match=r"the consumer groups g, .*1 scheduled"):
        admin_of(broker).delete_topic(TOPIC)


def test_a_deleted_topic_leaves_no_key_and_may_come_again(broker: Broker, server: RedisServer, url: str) -> None:
    publish(broker, 10)
    for group in ("g", "h"):
        pull(broker, group)
    broker.publish([Message(id="other", topic="other", body=b"")])

    admin_of(broker).delete_topic(TOPIC, force=True)

    assert broker.admin.topics() == ["other"]
    assert not [key for key in keys_of(server, url) if TOPIC in key]
    with pytest.raises(BrokerRefused, match="no topic"):
        admin_of(broker).delete_topic(TOPIC, force=True)
    assert set(publish(broker, 3)) == set(pull(broker, "g"))
    assert broker.admin.topics() == [TOPIC, "other"]


def outbox(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", *arguments])
    return int(ended.value.code or 0)


def test_the_commands_say_what_they_will_remove_and_delete_by_yes(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(broker, 3)
    pull(broker, "typo")

    assert outbox("group", "delete", TOPIC, "typo", "--url", url) == 2
    assert "--yes" in capsys.readouterr().err
    assert outbox("group", "delete", TOPIC, "typo", "--url", url, "--yes") == 1
    assert "hold 3 messages" in capsys.readouterr().err
    assert outbox("group", "delete", TOPIC, "typo", "--url", url, "--yes", "--force") == 0
    assert capsys.readouterr().out == f"{TOPIC}/typo deleted\n"
    assert outbox("topic", "delete", TOPIC, "--url", url, "--yes") == 0
    assert broker.admin.topics() == []
