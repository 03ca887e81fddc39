"""One ZooKeeper, three bookies and two clients for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.bookkeeper.cluster import BookKeeperCluster, logging_option
from tests.engines.jars import fetched_jars
from tests.engines.java_server import java_home

if TYPE_CHECKING:
    from tests.engines.bookkeeper.client import LedgerClient

BOOKIES = 3


@pytest.fixture(scope="session")
def jars() -> Path:
    """The jars of servers and client."""
    return fetched_jars(Path(__file__).with_name("pom.xml"))


@pytest.fixture(scope="session")
def running_cluster(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BookKeeperCluster]:
    """The servers of the whole run."""
    cluster = BookKeeperCluster(jars=jars, folder=tmp_path_factory.mktemp("bookkeeper"), bookies=BOOKIES)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running_cluster: BookKeeperCluster) -> BookKeeperCluster:
    """The servers, all alive: bookies that an earlier test killed are started again."""
    running_cluster.check_alive()
    running_cluster.restore()
    return running_cluster


@pytest.fixture(scope="session")
def jvm(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of this process's JVM, which runs. It logs an error for each append that fails, as is tested."""
    from tests.engines.bookkeeper.client import start_jvm

    folder = tmp_path_factory.mktemp("client")
    log = folder / "client.log"
    start_jvm(java_home=java_home(), jars=jars, options=[logging_option(folder / "log4j2.xml", level="warn", log=log)])
    return log


@pytest.fixture(scope="session")
def _writing_client(running_cluster: BookKeeperCluster, jvm: Path) -> Iterator[LedgerClient]:
    from tests.engines.bookkeeper.client import connected

    with connected(running_cluster.metadata_uri) as client:
        yield client


@pytest.fixture(scope="session")
def _recovering_client(running_cluster: BookKeeperCluster, jvm: Path) -> Iterator[LedgerClient]:
    from tests.engines.bookkeeper.client import connected

    with connected(running_cluster.metadata_uri) as client:
        yield client


@pytest.fixture
def client(cluster: BookKeeperCluster, jvm: Path, _writing_client: LedgerClient) -> LedgerClient:
    """The client that creates and writes ledgers."""
    print(f"the clients' log: {jvm}")  # shown with a failure, after which pytest keeps the folder
    return _writing_client


@pytest.fixture
def successor(cluster: BookKeeperCluster, _recovering_client: LedgerClient) -> LedgerClient:
    """Another client with connections of its own, as the process that takes over from a writer has."""
    return _recovering_client
