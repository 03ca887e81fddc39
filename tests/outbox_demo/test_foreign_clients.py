"""Plain clients of the demo log in as the adapters of the same URLs do."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_demo.jetstream import JetStream
from outbox_demo.plan import RunTopics
from tests.broker_adapter.nats.nats_server import NatsServer


@pytest.mark.parametrize(
    ("authorization", "login"),
    [({"token": "s3cret"}, "s3cret"), ({"user": "app", "password": "s3cret"}, "app:s3cret")],
    ids=["token", "password"],
)
def test_a_user_without_a_password_is_a_token_of_nats(tmp_path: Path, authorization: object, login: str) -> None:
    server = NatsServer(tmp_path / "server", settings={"authorization": authorization})
    server.start()
    try:
        client = JetStream(BrokerUrl.parse(f"nats://{login}@{server.address}", port=4222), RunTopics.of_new_run())
        client.make_topics()
        assert client.unsettled() == 0
        client.remove_topics()
        client.close()
    finally:
        server.kill()
