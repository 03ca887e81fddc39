"""TLS on a real server, with a login and a certificate of the client: another authority, and it is not spoken to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from outbox_broker.http.server import Tls
from outbox_core.common.errors import BrokerUnavailable, NotAuthorized
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import PublishStatus
from outbox_demo.ports import free_port
from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.redis.redis_cluster import SLOTS
from tests.broker_adapter.redis.redis_server import HOST, PASSWORD, RedisServer, redis_server

Open = Callable[[str], Broker]


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """A certificate for the server's address that vouches for itself."""
    return certificate(tmp_path, address=HOST)


@pytest.fixture
def tls_server(tls: Tls) -> Iterator[RedisServer]:
    """A server that speaks TLS alone, and asks its clients for a certificate and a password."""
    with redis_server(
        tls_port="yes",
        tls_cert_file=str(tls.certificate),
        tls_key_file=str(tls.key),
        tls_ca_cert_file=str(tls.certificate),
        requirepass=PASSWORD,
    ) as server:
        yield server


def url_of(server: RedisServer, tls: Tls, *, password: str = PASSWORD, ca_file: Path | None = None) -> str:
    files = f"cert_file={tls.certificate}&key_file={tls.key}&ca_file={ca_file or tls.certificate}"
    return f"rediss://:{password}@{HOST}:{server.port}/?wait=0&{files}"


def test_a_message_goes_over_tls_with_a_login(tls_server: RedisServer, tls: Tls, open_broker: Open) -> None:
    broker = open_broker(url_of(tls_server, tls))

    assert broker.publish([message("t", 0)])[0].status is PublishStatus.STORED


@pytest.mark.slow
def test_a_message_goes_to_a_cluster_over_tls(tls: Tls, open_broker: Open) -> None:
    ports = {"tls_port": "yes", "cluster_port": str(free_port(HOST))}
    files = {name: str(tls.certificate) for name in ("tls_cert_file", "tls_ca_cert_file")}
    with redis_server(
        cluster_enabled="yes", tls_cluster="yes", tls_key_file=str(tls.key), requirepass=PASSWORD, **files, **ports
    ) as node:
        url = url_of(node, tls).replace("rediss:", "rediss+cluster:")
        with redis_client(node, tls) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        [result] = open_broker(f"{url}&timeout_ms=60000").publish([message("t", 0)])

    assert result.status is PublishStatus.STORED


def redis_client(server: RedisServer, tls: Tls) -> redis.Redis:
    """A plain client over TLS, which closes itself at the end of a block."""
    files = {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key), "ssl_ca_certs": str(tls.certificate)}
    return redis.Redis(host=HOST, port=server.port, password=PASSWORD, protocol=2, ssl=True, **files)


def test_a_server_of_another_authority_is_not_spoken_to(
    tls_server: RedisServer, tls: Tls, open_broker: Open, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = certificate(tmp_path / "other", address=HOST)

    with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
        open_broker(url_of(tls_server, tls, ca_file=other.certificate)).publish([message("t", 0)])


def test_a_wrong_password_over_tls_is_not_authorized(tls_server: RedisServer, tls: Tls, open_broker: Open) -> None:
    with pytest.raises(NotAuthorized) as raised:
        open_broker(url_of(tls_server, tls, password="wrong")).publish([message("t", 0)])

    assert "wrong" not in str(raised.value)
