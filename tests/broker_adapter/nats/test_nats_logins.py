"""TLS and each login of NATS on real servers; what a user may not do; and that a password goes to no impostor."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nkeys
import pytest
from nats.js.api import StreamConfig

from outbox_core.common.errors import BrokerUnavailable, NotAuthenticated, NotAuthorized
from outbox_core.messages.broker_port import Broker, Inspectable
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.nats.nats_server import NatsEngine, NatsServer, run_plain
from tests.fixtures.cutting_tcp_proxy import cutting_tcp_proxy

MESSAGE = Message(id="1", topic="t", body=b"body")
Start = Callable[..., NatsServer]
Open = Callable[..., Broker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A server with settings of the test's own."""
    with ExitStack() as stack:

        def started(**settings: Any) -> NatsServer:
            server = NatsServer(tmp_path / "server", settings=settings)
            stack.callback(server.kill)
            server.start()
            return server

        yield started


@pytest.fixture
def opened() -> Iterator[Open]:
    """Connect to a URL; closed at the end of the test."""
    with ExitStack() as stack:

        def connected(url: str, **options: object) -> Broker:
            broker = connect(url, **options)
            stack.callback(broker.close)
            return broker

        yield connected


def make_stream(server: NatsServer, **login: Any) -> None:
    run_plain(
        [f"nats://{server.address}"],
        lambda client: client.jetstream().add_stream(StreamConfig(name="T", subjects=["t"])),
        **login,
    )


def is_stored(broker: Broker) -> bool:
    return [one.status for one in broker.publish([MESSAGE])] == [PublishStatus.STORED]


@pytest.mark.parametrize("place", ["url", "option"])
def test_a_token_logs_in(start: Start, opened: Open, place: str) -> None:
    server = start(authorization={"token": "s3cret"})
    make_stream(server, token="s3cret")

    if place == "url":
        assert is_stored(opened(f"nats://s3cret@{server.address}"))
    else:
        assert is_stored(opened(f"nats://{server.address}", token="s3cret"))


def test_a_password_comes_from_its_file(start: Start, opened: Open, tmp_path: Path) -> None:
    server = start(authorization={"user": "app", "password": "s3cret"})
    make_stream(server, user="app", password="s3cret")
    (tmp_path / "password").write_text("s3cret\n")

    assert is_stored(opened(f"nats://app@{server.address}?password_file={tmp_path / 'password'}"))


def test_no_login_where_one_is_needed_is_not_authenticated(start: Start, opened: Open) -> None:
    server = start(authorization={"token": "s3cret"})

    with pytest.raises(NotAuthenticated):
        opened(f"nats://{server.address}").publish([MESSAGE])


def test_a_seed_logs_in(start: Start, opened: Open, tmp_path: Path) -> None:
    seed, public = key_pair(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.nk").write_bytes(seed)
    server = start(authorization={"users": [{"nkey": public}]})
    make_stream(server, nkeys_seed=str(tmp_path / "user.nk"))

    assert is_stored(opened(f"nats://{server.address}?nkey_file={tmp_path / 'user.nk'}"))


def test_credentials_of_an_operators_account_log_in(start: Start, opened: Open, tmp_path: Path) -> None:
    operator, user = key_pair(nkeys.PREFIX_BYTE_OPERATOR), key_pair(nkeys.PREFIX_BYTE_USER)
    account, system = key_pair(nkeys.PREFIX_BYTE_ACCOUNT), key_pair(nkeys.PREFIX_BYTE_ACCOUNT)
    limits = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account_jwt = signed(operator, account[1], {"type": "account", "version": 2, "limits": {**limits, **unlimited}})
    system_jwt = signed(operator, system[1], {"type": "account", "version": 2, "limits": unlimited})
    user_jwt = signed(account, user[1], {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1})
    server = start(
        operator=signed(operator, operator[1], {"type": "operator", "version": 2}),
        system_account=system[1],
        resolver="MEMORY",
        resolver_preload={account[1]: account_jwt, system[1]: system_jwt},
    )
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user[0].decode()}\n------END USER NKEY SEED------\n"
    )
    make_stream(server, user_credentials=str(creds))

    assert is_stored(opened(f"nats://{server.address}?creds_file={creds}"))


@pytest.mark.parametrize("scheme", ["natss", "tls"])
def test_messages_go_over_tls_with_a_clients_certificate(
    start: Start, opened: Open, tmp_path: Path, scheme: str
) -> None:
    tls = certificate(tmp_path, address="127.0.0.1")
    server = start(
        tls={
            "cert_file": str(tls.certificate),
            "key_file": str(tls.key),
            "ca_file": str(tls.certificate),
            "verify": True,
        }
    )
    files = f"ca_file={tls.certificate}&cert_file={tls.certificate}&key_file={tls.key}"

    broker = opened(f"{scheme}://{server.address}?{files}")
    [result] = broker.publish([MESSAGE])

    assert "no stream covers" in str(result.error)  # asked over TLS, since nothing else is possible there
    [connection] = [one for one in server.monitored("connz")["connections"] if one.get("name") == "outbox-mq"]
    assert connection["tls_version"] == "1.3"


def test_a_server_whose_certificate_nobody_vouches_for_is_not_spoken_to(
    start: Start, opened: Open, tmp_path: Path
) -> None:
    tls = certificate(tmp_path, address="127.0.0.1")
    server = start(tls={"cert_file": str(tls.certificate), "key_file": str(tls.key)})

    with pytest.raises(BrokerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        opened(f"natss://app:s3cret@{server.address}").publish([MESSAGE])


@pytest.mark.parametrize("login", ["app:s3cret", "s3cret"])
def test_a_server_without_tls_gets_no_password_from_a_url_that_asks_for_tls(
    start: Start, opened: Open, login: str
) -> None:
    server = start()

    with cutting_tcp_proxy(server.port) as proxy:
        with pytest.raises(BrokerUnavailable, match="offers no TLS"):
            opened(f"natss://{login}@127.0.0.1:{proxy.port}").publish([MESSAGE])
        assert b"s3cret" not in proxy.requests
        with pytest.raises(BrokerUnavailable, match="offers no TLS"):
            opened(f"natss://127.0.0.1:{proxy.port}").publish([MESSAGE])
        assert b"PUB" not in proxy.requests


def limited(permissions: Mapping[str, Any]) -> dict[str, Any]:
    users = [{"user": "app", "password": "s3cret", "permissions": permissions}, {"user": "admin", "password": "admin"}]
    return {"authorization": {"users": users}}


def test_a_topic_that_the_user_may_not_publish_to_is_deferred_and_the_others_are_stored(
    start: Start, opened: Open
) -> None:
    server = start(**limited({"publish": {"deny": ["Secret.Topic"]}}))
    make_stream(server, user="admin", password="admin")
    broker = opened(f"nats://app:s3cret@{server.address}")

    results = broker.publish([Message(id="0", topic="Secret.Topic", body=b""), MESSAGE])

    assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED]
    assert "permissions" in str(results[0].error)


def test_a_user_who_may_not_receive_answers_is_not_authorized_with_the_cure(start: Start, opened: Open) -> None:
    server = start(**limited({"subscribe": ["shop.inbox.>"]}))
    make_stream(server, user="admin", password="admin")

    with pytest.raises(NotAuthorized, match="inbox_prefix="):
        opened(f"nats://app:s3cret@{server.address}").publish([MESSAGE])
    [result] = opened(f"nats://app:s3cret@{server.address}?inbox_prefix=shop.inbox").publish([MESSAGE])

    assert result.status is PublishStatus.STORED


def test_a_user_who_may_receive_answers_from_now_on_publishes_without_a_restart(start: Start, opened: Open) -> None:
    server = start(**limited({"subscribe": ["shop.inbox.>"]}))
    make_stream(server, user="admin", password="admin")
    broker = opened(f"nats://app:s3cret@{server.address}")
    with pytest.raises(NotAuthorized):
        broker.publish([MESSAGE])
    refused = server.connections("outbox-mq")

    server.reload(**limited({"subscribe": ["_INBOX.>"]}))

    assert is_stored(broker)
    assert set(server.connections("outbox-mq")).isdisjoint(refused)


def test_a_user_who_may_not_ask_the_api_publishes_and_the_inspection_says_that_it_saw_nothing(
    start: Start, opened: Open
) -> None:
    server = start(**limited({"publish": ["t", "missing"]}))
    make_stream(server, user="admin", password="admin")
    broker = opened(f"nats://app:s3cret@{server.address}")
    assert isinstance(broker, Inspectable)

    results = broker.publish([Message(id="0", topic="missing", body=b""), MESSAGE])

    assert [one.status for one in results] == [PublishStatus.DEFERRED, PublishStatus.STORED]
    [weakness] = broker.inspect(["t"]).weaknesses
    assert "$JS.API.STREAM" in weakness.problem


@pytest.mark.slow
def test_a_server_without_jetstream_is_an_outage_with_the_cure(tmp_path: Path, opened: Open) -> None:
    server = NatsServer(tmp_path / "plain", jetstream=False)
    server.start()
    try:
        with pytest.raises(BrokerUnavailable, match="`jetstream`"):
            opened(f"nats://{server.address}?timeout_ms=3000").publish([MESSAGE])
    finally:
        server.kill()


def test_of_several_hosts_one_that_answers_is_enough(engine: NatsEngine, opened: Open) -> None:
    engine.make_topic("several.hosts")
    url = engine.url.replace("@", "@127.0.0.1:1,127.0.0.1:2,")

    assert opened(url).publish([Message(id="1", topic="several.hosts", body=b"")])[0].status is PublishStatus.STORED


def key_pair(prefix: int) -> tuple[bytes, str]:
    """A seed, and its public key."""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return bytes(seed), nkeys.from_seed(bytearray(seed)).public_key.decode()


def signed(issuer: tuple[bytes, str], subject: str, claims: Mapping[str, Any]) -> str:
    """A JWT as `nsc` makes them."""
    body = {"iat": 1_700_000_000, "iss": issuer[1], "name": "test", "sub": subject, "nats": claims}
    digest = hashlib.new("sha512_256", json.dumps(body).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    text = b".".join(encoded(one) for one in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
    return (text + b"." + base64_url(nkeys.from_seed(bytearray(issuer[0])).sign(text))).decode()


def encoded(part: Mapping[str, Any]) -> bytes:
    return base64_url(json.dumps(part).encode())


def base64_url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
