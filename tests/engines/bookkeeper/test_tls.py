"""Bookies that serve clients by TLS alone, and a ZooKeeper with TLS and a login: nodes work, and mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_broker.cluster.bookie_tls import BookieTls, tls_problems
from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE, JavaRuntime
from outbox_broker.cluster.bookkeeper.zookeeper_login import set_zookeeper_login
from outbox_broker.cluster.cluster_settings import load_cluster_settings
from outbox_broker.cluster.shard_openers import ledger_shards
from outbox_broker.segments.ledgers import LedgerFailed
from outbox_core.common.errors import ConfigurationError
from outbox_core.zookeeper.zookeeper_settings import ZooKeeperSecurity
from outbox_demo.ports import free_port
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.tls_settings import (
    PASSWORD,
    UNIT,
    USER,
    bookie_settings,
    zookeeper_login_option,
    zookeeper_settings,
)
from tests.engines.java_server import java_home
from tests.fixtures.certificate_authority import Authority, Certificate
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish

BOOKIES = 4
EXPIRED = 4
"""The number of the bookie whose certificate expired."""
TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True)
class SecureCluster:
    """Servers, and what a client of them needs."""

    servers: BookKeeperCluster
    authority: Authority
    client: Certificate
    zookeeper_hosts: str

    @property
    def tls(self) -> BookieTls:
        return BookieTls(ca_file=self.authority.file, certificate=self.client.certificate, key=self.client.key)

    @property
    def expired(self) -> str:
        return self.servers.bookie_ids[EXPIRED - 1]


@pytest.fixture(scope="module")
def secure(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """Bookies of which one has an expired certificate."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "certificates")
    addresses: list[tuple[str, int]] = []

    def of_bookie(number: int, host: str) -> dict[str, object]:
        return bookie_settings(authority, authority.certificate(host, unit=UNIT, expired=number == EXPIRED))

    def of_zookeeper(host: str) -> dict[str, object]:
        addresses.append((host, free_port(host)))
        return zookeeper_settings(authority, authority.certificate(host), port=addresses[0][1])

    servers = BookKeeperCluster(
        jars=jars, folder=folder, bookies=BOOKIES, bookie_settings=of_bookie, zookeeper_settings=of_zookeeper,
        zookeeper_options=[zookeeper_login_option(folder / "login")],
    )  # fmt: skip
    try:
        servers.start()
        host, port = addresses[0]
        yield SecureCluster(servers, authority, authority.certificate("127.0.0.1", unit=UNIT), f"{host}:{port}")
    finally:
        servers.stop()


@pytest.fixture
def running(
    secure: SecureCluster, jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningCluster]:
    """A delay cluster without nodes, all of whose connections are encrypted."""
    (tmp_path / "ledgers-password").write_text("of the ledgers")
    (tmp_path / "zookeeper-password").write_text(PASSWORD)
    settings = {
        "ledgers_uri": f"zk+longhierarchical://{secure.zookeeper_hosts}/ledgers",
        "ledgers_password_file": str(tmp_path / "ledgers-password"),
        "ledgers_tls": "true", "ledgers_ca_file": str(secure.authority.file),
        "ledgers_certificate": str(secure.client.certificate), "ledgers_key": str(secure.client.key),
        "zookeeper_tls": "true", "zookeeper_ca_file": str(secure.authority.file),
        "zookeeper_certificate": str(secure.client.both), "zookeeper_key": str(secure.client.both),
        "zookeeper_user": USER, "zookeeper_password_file": str(tmp_path / "zookeeper-password"),
        "session_ms": "30000",  # also the time that a bookie has for a handshake
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(f"OUTBOX_CLUSTER__{name.upper()}", value)
    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    monkeypatch.setenv("JAVA_HOME", str(java_home()))
    with ExitStack() as stack:
        yield RunningCluster(secure.zookeeper_hosts, tmp_path, stack, settings=settings)


def test_a_node_works_by_tls_and_status_names_the_bookie_whose_certificate_expired(
    running: RunningCluster, secure: SecureCluster
) -> None:
    node = running.node("n1")
    running.wait_until_served(node)
    batch = messages(100)

    publish(node.url, batch)
    came = running.consume({message.id for message in batch})
    bookies = running.status()["bookies"]

    assert len(came) == 100
    assert list(bookies["tls_problems"]) == [secure.expired]
    assert "certificate has expired" in bookies["tls_problems"][secure.expired]
    assert "no bookie can be spared" in bookies["warning"]
    assert f"bookie {secure.expired}: its certificate is not trusted" in running.command("status").stdout
    assert "bookie_tls_failed" in node.log
    assert PASSWORD not in node.log


def test_a_node_does_not_start_with_the_ca_of_others(
    running: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path / "other")
    monkeypatch.setenv("OUTBOX_CLUSTER__LEDGERS_CA_FILE", str(other.file))
    settings = load_cluster_settings({"store": running.store}, file=None)

    with pytest.raises(ConfigurationError, match=r"no bookie can be reached by TLS; .* not trusted.*ledgers_ca_file"):
        ledger_shards(settings).__enter__()


def test_bookies_without_tls_and_clients_without_a_certificate_are_told_apart(
    secure: SecureCluster, cluster: BookKeeperCluster
) -> None:
    plain = tls_problems(cluster.bookie_ids, secure.tls, timeout_ms=TIMEOUT_MS)
    unknown = tls_problems(
        secure.servers.bookie_ids[:1], BookieTls(ca_file=secure.authority.file), timeout_ms=TIMEOUT_MS
    )

    assert {problem.partition(":")[0] for problem in plain.values()} == {"has no TLS"}
    assert list(plain) == cluster.bookie_ids
    assert [problem.partition(":")[0] for problem in unknown.values()] == ["it refuses this client"]


def test_entries_go_to_bookies_by_tls_alone_and_to_those_of_the_right_ca(
    secure: SecureCluster, runtime: JavaRuntime, tmp_path: Path
) -> None:
    def written(tls: BookieTls | None, **limits: int) -> bytes:
        limits = {"operation_ms_max": TIMEOUT_MS, **limits}
        options = BookKeeperOptions(ensemble=2, write_quorum=2, ack_quorum=2, tls=tls, **limits)  # type: ignore[arg-type]
        ledgers = JavaLedgers(runtime, secure.servers.metadata_uri, options=options)
        try:
            writer = ledgers.begin_create({})()
            writer.append(b"entry")
            writer.confirm(1)
            return ledgers.read(writer.ledger_id, 0, 0)[0]
        finally:
            ledgers.close()

    assert written(secure.tls, request_s_max=60) == b"entry"
    with pytest.raises(LedgerFailed, match="append to ledger"):
        written(None)
    with pytest.raises(LedgerFailed, match="`outbox delay status` shows the bookies to which TLS fails"):
        written(BookieTls(ca_file=Authority(tmp_path / "other").file), operation_ms_max=3_000)


def test_a_certificate_for_zookeeper_in_two_files_is_refused_with_the_cure(
    secure: SecureCluster, runtime: JavaRuntime
) -> None:
    security = ZooKeeperSecurity(tls=True, certificate=secure.client.certificate, key=secure.client.key)

    with pytest.raises(ConfigurationError, match="append the key to the certificate and name that file twice"):
        set_zookeeper_login(runtime, security)
