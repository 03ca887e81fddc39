"""DELETE of topics and groups over HTTP and by its client: who may, what is in use, and what consumers are told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import requests

from outbox_broker.http.access_control import Access, Principal, Role
from outbox_broker.http.server import HttpServer
from outbox_core import Broker, Message, connect
from outbox_core.common.errors import BrokerRefused, GroupDeleted, InUse, NotAuthorized
from outbox_core.messages.broker_port import TopicAdmin

TOPIC, GROUP = "orders", "billing"
DEADLINE_MS = 120_000

type_of_client = Callable[..., requests.Response]
type_of_serve = Callable[..., HttpServer]


@pytest.fixture
def server(serve: type_of_serve) -> HttpServer:
    """A server of the test's own."""
    return serve()


@pytest.fixture
def broker(server: HttpServer) -> Iterator[Broker]:
    """A client of it."""
    made = connect(server.url)
    yield made
    made.close()


def admin_of(broker: Broker) -> TopicAdmin:
    admin = broker.admin
    assert isinstance(admin, TopicAdmin)
    return admin


def publish(broker: Broker, *ids: str, topic: str = TOPIC) -> None:
    broker.publish([Message(id=one, topic=topic, body=b"") for one in ids])


def waiting_pulls(client: type_of_client, url: str) -> int:
    """How many long polls wait, by the server's own word."""
    [line] = [one for one in client("GET", f"{url}/metrics").text.splitlines() if one.startswith("broker_http_waiting")]
    return int(float(line.rpartition(" ")[2]))


def test_topics_and_groups_are_deleted(server: HttpServer, broker: Broker, client: type_of_client) -> None:
    publish(broker, "a")
    broker.ack([one.receipt for one in broker.pull(TOPIC, GROUP)])
    assert f'topic="{TOPIC}"' in client("GET", f"{server.url}/metrics").text

    admin_of(broker).delete_group(TOPIC, GROUP)
    with pytest.raises(BrokerRefused, match="no consumer group"):
        admin_of(broker).delete_group(TOPIC, GROUP)
    admin_of(broker).delete_topic(TOPIC)

    assert broker.admin.topics() == []
    assert f'topic="{TOPIC}"' not in client("GET", f"{server.url}/metrics").text
    answer = client("DELETE", f"{server.url}/v1/topics/{TOPIC}")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:outbox-mq:problem:not-found")
    assert client("DELETE", f"{server.url}/v1/topics/{TOPIC}?force=perhaps").status_code == 422


def test_what_is_in_use_is_a_conflict_that_says_the_cure(
    server: HttpServer, broker: Broker, client: type_of_client
) -> None:
    publish(broker, "a")
    [held] = broker.pull(TOPIC, GROUP)

    for path in (f"/v1/topics/{TOPIC}/groups/{GROUP}", f"/v1/topics/{TOPIC}"):
        answer = client("DELETE", server.url + path)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:outbox-mq:problem:in-use")
        assert "force" in answer.json()["detail"]
    with pytest.raises(InUse, match="stop its consumers"):
        admin_of(broker).delete_group(TOPIC, GROUP)
    assert InUse.retryable is False

    admin_of(broker).delete_topic(TOPIC, force=True)
    assert broker.ack([held.receipt]) == ["unknown"]
    assert broker.nack([held.receipt]) == ["stale"]
    assert broker.extend([held.receipt], invisible_ms=1_000) == ["stale"]


def test_pulls_that_wait_are_told_at_once_that_their_group_was_deleted(
    server: HttpServer, broker: Broker, client: type_of_client
) -> None:
    publish(broker, "a")
    broker.ack([one.receipt for one in broker.pull(TOPIC, GROUP)])
    with ThreadPoolExecutor() as pool:
        pulls = [pool.submit(broker.pull, TOPIC, GROUP, wait_ms=25_000) for _ in range(3)]
        while waiting_pulls(client, server.url) < 3:
            assert not any(one.done() for one in pulls)
        with pytest.raises(InUse, match="3 pulls wait"):
            admin_of(broker).delete_group(TOPIC, GROUP)

        admin_of(broker).delete_group(TOPIC, GROUP, force=True)

        errors = [one.exception() for one in pulls]
    assert [type(one) for one in errors] == [GroupDeleted] * 3
    assert GroupDeleted.retryable is False
    again = broker.pull(TOPIC, GROUP, wait_ms=25_000)  # waits in the line that they have left: it is another group
    assert [one.id for one in again] == ["a"]


def test_deleting_needs_the_role_admin_for_that_topic(serve: type_of_serve, client: type_of_client) -> None:
    def token(name: str, role: Role, *topics: str) -> tuple[bytes, Principal]:
        principal = Principal(name=name, roles=frozenset({role}), topics=topics)
        return hashlib.sha256(name.encode()).digest(), principal

    tokens = dict(
        [token("all", Role.PUBLISH, "*"), token("mine", Role.ADMIN, "mine.*"), token("pull", Role.CONSUME, "*")]
    )
    server = serve(access=Access(tokens=tokens))
    with closing(connect(server.url, token="all")) as publisher:
        publish(publisher, "a", topic="mine.1")
        publish(publisher, "b", topic="other")
    for name in ("all", "pull"):
        with closing(connect(server.url, token=name)) as broker, pytest.raises(NotAuthorized):
            admin_of(broker).delete_topic("mine.1")

    with closing(connect(server.url, token="mine")) as broker:
        for topic in ("other", "missing"):
            with pytest.raises(NotAuthorized):
                admin_of(broker).delete_topic(topic, force=True)
            with pytest.raises(NotAuthorized):
                admin_of(broker).delete_group(topic, GROUP)
        admin_of(broker).delete_topic("mine.1")
        assert broker.admin.topics() == []


def test_a_limited_token_cannot_use_up_the_servers_topics(serve: type_of_serve) -> None:
    principal = Principal(name="lim", roles=frozenset(Role), topics=("lim.*",), topics_max=2)
    server = serve(access=Access(tokens={hashlib.sha256(b"lim").digest(): principal}))
    with closing(connect(server.url, token="lim")) as broker:
        publish(broker, "a", topic="lim.1")
        publish(broker, "b", topic="lim.2")

        [rejected] = broker.publish([Message(id="c", topic="lim.3", body=b"")])
        with pytest.raises(BrokerRefused, match="topics_max of the token"):
            broker.pull("lim.3", GROUP)

        assert rejected.status == "rejected"
        assert "topics_max of the token" in (rejected.error or "")
        admin_of(broker).delete_topic("lim.1")
        publish(broker, "d", topic="lim.3")
        assert broker.admin.topics() == ["lim.2", "lim.3"]


def test_an_embedded_broker_deletes_as_a_server_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    with closing(connect(f"embedded:{tmp_path_factory.mktemp('embedded')}")) as broker:
        publish(broker, "a")
        broker.pull(TOPIC, GROUP)
        with pytest.raises(InUse):
            admin_of(broker).delete_group(TOPIC, GROUP)
        admin_of(broker).delete_group(TOPIC, GROUP, force=True)
        with pytest.raises(BrokerRefused):
            admin_of(broker).delete_group(TOPIC, GROUP)
        admin_of(broker).delete_topic(TOPIC)
        with pytest.raises(BrokerRefused):
            admin_of(broker).delete_topic(TOPIC)
