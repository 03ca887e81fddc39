"""Three MariaDB servers of the tests' own that Galera makes one cluster, and a balancer before them. Not a test.

They run as a user without privileges: rsync, by which a node copies another one's data, becomes that by itself and then
finds no file of root's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy.engine import make_url

from outbox_demo.ports import free_port
from tests.engines.java_server import own_loopback_network
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy
from tests.fixtures.local_server import Durability, LocalServer, Program, find_program, scratch_folder, servers_folder
from tests.fixtures.servers import FOLDER_PREFIX

NODES: Final = 3
WAIT_SECONDS: Final = 120
_HEARTBEATS: Final = "evs.keepalive_period=PT0.2S;evs.inactive_check_period=PT0.2S"
_PROVIDER: Final = f"gcache.size=32M;{_HEARTBEATS};evs.suspect_timeout=PT10S;evs.inactive_timeout=PT30S"
"""A node that was killed is expelled after ten seconds. At one second, another one that stood still for longer, on a
busy machine, was suspected beside it: without a majority the cluster took nothing any more, for good."""
_LAUNCHER: Final = """#!/bin/sh
export PATH='{folder}/galera/bin':"$PATH" LD_LIBRARY_PATH='{folder}/galera/lib'
[ "$(id -u)" = 0 ] || exec "$@"
chown -R nobody '{folder}'
exec setpriv --reuid=nobody --regid=nogroup --clear-groups --pdeathsig=keep "$@"
"""


class GaleraCluster:
    """The nodes, each a LocalServer, all synced; the first is never killed, since it alone may begin a cluster."""

    def __init__(self, nodes: Sequence[LocalServer], balancer: CuttingTcpProxy) -> None:
        self.nodes = nodes
        self.balancer = balancer
        """Leads each connection to the next node that answers."""

    def url(self, database_url: str, node: LocalServer | None = None) -> str:
        """The database's URL at a node; at the balancer without one."""
        port = self.balancer.port if node is None else make_url(node.url).port
        return make_url(database_url).set(port=port).render_as_string(hide_password=False)

    def wait_until_synced(self) -> None:
        """Wait until each node that runs knows all others and takes statements."""
        deadline = time.monotonic() + WAIT_SECONDS
        for node in self.nodes:
            while (state := _state_of(node)) != ("Synced", str(NODES)):
                assert time.monotonic() < deadline, state
                time.sleep(0.01)


@contextlib.contextmanager
def galera_cluster() -> Iterator[GaleraCluster]:
    """A cluster for the length of a block. Main thread only. Raises FileNotFoundError if nobody fetched Galera."""
    fetched, program = servers_folder().parent / "engines" / "galera", find_program("mariadb")
    if program is None or not fetched.is_dir():
        raise FileNotFoundError("MariaDB or Galera is not there. Run ./scripts/test --engines galera")
    prefix = f"{FOLDER_PREFIX}{os.getpid()}-galera-"
    with tempfile.TemporaryDirectory(dir=scratch_folder(), prefix=prefix, ignore_cleanup_errors=True) as folder:
        nodes = _nodes(Path(folder), program, fetched)
        balancer = CuttingTcpProxy(0)
        try:
            for node in nodes:
                node.start()
            balancer.lead_to(*(make_url(node.url).port or 0 for node in nodes))
            cluster = GaleraCluster(nodes, balancer)
            cluster.wait_until_synced()
            yield cluster
        finally:
            balancer.close()
            for node in nodes:
                node.kill9()


def _nodes(folder: Path, program: Program, fetched: Path) -> list[LocalServer]:
    shutil.copytree(fetched, folder / "galera", symlinks=True)
    launcher = folder / "launcher"
    launcher.write_text(_LAUNCHER.format(folder=folder))
    launcher.chmod(0o755)
    program = replace(program, serve=(str(launcher), *program.serve))
    network = own_loopback_network()
    hosts = [f"{network}.{number}" for number in range(1, NODES + 1)]
    nodes = []
    for number, host in enumerate(hosts):
        (node := folder / f"n{number}").mkdir()
        options = (*Durability.NONE.value, *_options(host, hosts, library=folder / "galera/lib/libgalera_smm.so"))
        nodes.append(LocalServer(program, node, options=(*options, *(["--wsrep-new-cluster"] if number == 0 else []))))
    return nodes


def _options(host: str, hosts: Sequence[str], *, library: Path) -> Sequence[str]:
    return (
        "--wsrep-on=ON",
        f"--wsrep-provider={library}",
        f"--wsrep-cluster-address=gcomm://{','.join(hosts)}",
        f"--wsrep-node-address={host}",
        f"--wsrep-provider-options=gmcast.listen_addr=tcp://{host}:4567;ist.recv_addr={host}:4568;{_PROVIDER}",
        "--wsrep-sst-method=rsync",
        f"--wsrep-sst-receive-address={host}:{free_port('127.0.0.1')}",
        "--innodb-autoinc-lock-mode=2",
    )


def _state_of(node: LocalServer) -> tuple[Any, ...]:
    names = ("wsrep_local_state_comment", "wsrep_cluster_size")
    found = dict(node.execute(f"SHOW STATUS WHERE variable_name IN {names}"))
    return tuple(found[name] for name in names)
