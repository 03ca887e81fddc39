"""A ZooKeeper of three servers, three bookies and two clients for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.bookkeeper.cluster import BookKeeperCluster, logging_option
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.engines.jars import fetched_jars
from tests.engines.java_server import java_home

if TYPE_CHECKING:
    from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers
    from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
    from tests.engines.bookkeeper.client import LedgerClient
    from tests.outbox_broker.cluster.broker_nodes import BrokerNodes
    from tests.outbox_broker.cluster.running_cluster import RunningCluster

BOOKIES = 3
ZOOKEEPERS = 3


@pytest.fixture(scope="session")
def jars() -> Path:
    """The jars of servers and client."""
    return fetched_jars(Path(__file__).with_name("pom.xml"))


@pytest.fixture(scope="session")
def running_cluster(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BookKeeperCluster]:
    """The servers of the whole run."""
    folder = tmp_path_factory.mktemp("bookkeeper")
    cluster = BookKeeperCluster(jars=jars, folder=folder, bookies=BOOKIES, zookeepers=ZOOKEEPERS)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running_cluster: BookKeeperCluster) -> BookKeeperCluster:
    """The servers, all alive: those that an earlier test killed are started again."""
    running_cluster.check_alive()
    running_cluster.restore()
    return running_cluster


@pytest.fixture(scope="session")
def runtime(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> JavaRuntime:
    """This process's JVM. It logs an error for each append that fails, as is tested."""
    from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime, JvmOptions

    folder = tmp_path_factory.mktemp("client")
    config = folder / "log4j2.xml"
    logging_option(config, level="warn", log=folder / "client.log")
    return JavaRuntime.start(
        jars=jars, options=JvmOptions(logging_config=config, jvm=next(java_home().rglob("libjvm.so")))
    )  # fmt: skip


@pytest.fixture(scope="session")
def jvm(runtime: JavaRuntime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the log of this process's JVM, which runs."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def _writing_client(running_cluster: BookKeeperCluster, jvm: Path) -> Iterator[LedgerClient]:
    from tests.engines.bookkeeper.client import connected

    with connected(running_cluster.metadata_uri_of_one_server) as client:
        yield client


@pytest.fixture(scope="session")
def _recovering_client(running_cluster: BookKeeperCluster, jvm: Path) -> Iterator[LedgerClient]:
    from tests.engines.bookkeeper.client import connected

    with connected(running_cluster.metadata_uri_of_one_server) as client:
        yield client


@pytest.fixture
def client(cluster: BookKeeperCluster, jvm: Path, _writing_client: LedgerClient) -> LedgerClient:
    """The client that creates and writes ledgers."""
    print(f"the clients' log: {jvm}")  # shown with a failure, after which pytest keeps the folder
    _writing_client.wait_until_ledgers_can_be_made()
    return _writing_client


@pytest.fixture
def successor(cluster: BookKeeperCluster, _recovering_client: LedgerClient) -> LedgerClient:
    """Another client with connections of its own, as the process that takes over from a writer has."""
    return _recovering_client


@pytest.fixture(scope="session")
def _own_client(running_cluster: BookKeeperCluster, runtime: JavaRuntime) -> Iterator[JavaLedgers]:
    from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers

    # A bookie that is merely slow, on a busy machine, is not a lost one.
    options = BookKeeperOptions(password=b"secret", request_s_max=60, operation_ms_max=120_000, session_ms=30_000)
    opened = JavaLedgers(runtime, running_cluster.metadata_uri, options=options)
    yield opened
    opened.close()


@pytest.fixture
def ledgers(cluster: BookKeeperCluster, _own_client: JavaLedgers) -> JavaLedgers:
    """A client of this project's, which knows that all bookies are alive."""
    wait_until_ledgers_can_be_made(_own_client)
    return _own_client


@pytest.fixture(scope="session")
def zookeeper(running_cluster: BookKeeperCluster) -> Iterator[Any]:
    """A client of ZooKeeper."""
    from kazoo.client import KazooClient

    client = KazooClient(running_cluster.zookeeper_hosts, timeout=30)
    client.start(timeout=60)
    yield client
    client.stop()
    client.close()


@pytest.fixture
def node_settings(
    cluster: BookKeeperCluster, jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """The settings of nodes, as processes of their own, whose shards are on the ledgers of the bookies."""
    from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE

    monkeypatch.setenv(JARS_VARIABLE, str(jars))
    monkeypatch.setenv("JAVA_HOME", str(java_home()))
    password = tmp_path / "ledgers-password"
    password.write_text("of the ledgers")
    settings = {"ledgers_uri": cluster.metadata_uri, "ledgers_password_file": str(password)}
    return settings | {"ensemble": "2", "write_quorum": "2", "ack_quorum": "2"}  # which a third bookie can stand in for


@pytest.fixture
def running(cluster: BookKeeperCluster, node_settings: Mapping[str, str], tmp_path: Path) -> Iterator[RunningCluster]:
    """A delay cluster without nodes."""
    from tests.outbox_broker.cluster.running_cluster import RunningCluster

    with ExitStack() as stack:
        yield RunningCluster(cluster.zookeeper_hosts, tmp_path, stack, settings=node_settings)


@pytest.fixture
def broker_nodes(cluster: BookKeeperCluster, node_settings: Mapping[str, str], tmp_path: Path) -> Iterator[BrokerNodes]:
    """A broker without nodes."""
    from tests.outbox_broker.cluster.broker_nodes import BrokerNodes

    with ExitStack() as stack:
        yield BrokerNodes(cluster.zookeeper_hosts, tmp_path, stack, settings=node_settings)
