"""Three nodes of RabbitMQ of the tests' own, a cluster, each behind a proxy, to kill, pause and start again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pika
import pytest

from outbox_broker.http.server import Tls
from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.broker_adapter.rabbitmq.rabbitmq_engine import PASSWORD, USER, plain_message
from tests.broker_adapter.rabbitmq.rabbitmq_server import (
    ADMIN,
    HOST,
    ApiRefused,
    PortMapper,
    RabbitMqPrograms,
    RabbitMqServer,
    wait_for,
)
from tests.engines.engine_under_fault import used_proxy
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy
from tests.fixtures.local_server import servers_folder

SERIES: Final = "4.3"
NODES: Final = 3
READ_SECONDS_MAX: Final = 120
COOKIE: Final = "OUTBOXTESTS"
QUORUM: Final = {"x_queue_type": "quorum", "x_quorum_initial_group_size": NODES}


def newest_programs() -> RabbitMqPrograms:
    """Those that `./scripts/test --engines rabbitmq` fetched."""
    folder = servers_folder().parent / "engines" / f"rabbitmq-{SERIES}"
    if not folder.is_dir():
        pytest.fail(f"RabbitMQ {SERIES} is not there. Run ./scripts/test --engines rabbitmq", pytrace=False)
    lib = folder / "root" / "usr" / "lib"
    return RabbitMqPrograms(scripts=lib / "rabbitmq" / "bin", erlang=lib / "erlang")


class RabbitMqCluster:
    """An EngineUnderFault. Topics are quorum queues with a replica on each node."""

    copies_per_publish_max = 1

    def __init__(self, folder: Path, *, tls: Tls, programs: RabbitMqPrograms) -> None:
        self._mapper = PortMapper(programs)
        names = [f"r{number}@{HOST}" for number in range(1, NODES + 1)]
        self.nodes: Mapping[str, RabbitMqServer] = {
            name: RabbitMqServer(
                folder / name, tls=tls, programs=programs, mapper=self._mapper, node=name, settings=_membership(names)
            )
            for name in names
        }
        for name in names:
            (folder / name).mkdir(parents=True)
            cookie = folder / name / ".erlang.cookie"
            cookie.write_text(COOKIE)
            cookie.chmod(0o400)
        self._proxies = [CuttingTcpProxy(node.port) for node in self.nodes.values()]

    @property
    def url(self) -> str:
        """Of all nodes, through their proxies."""
        return self._url(proxy.port for proxy in self._proxies)

    @property
    def direct_url(self) -> str:
        """Of all nodes, with what lets the adapter see how queues are set."""
        first = next(iter(self.nodes.values()))
        ports = (node.port for node in self.nodes.values())
        return f"{self._url(ports)}?management={quote(first.management_url)}"

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """One a node."""
        return self._proxies

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """The client has one connection."""
        return used_proxy(self._proxies)

    def start(self) -> None:
        """Form the cluster, with the user of the tests."""
        self._begin()
        self._one().add_user(USER, PASSWORD, tags="monitoring")

    def make_ordered_topic(self, topic: str) -> None:
        """A quorum queue; returns when its three replicas are members, and each node has written down that it is one.

        A node does so within seconds. One that is killed before comes back with an empty replica.
        """
        self._one().declare(topic, **QUORUM)
        wait_for(lambda: len(self._queue(topic).get("online", ())) == NODES)
        for node in self.nodes.values():
            node.control("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """The queue's messages, which stay there. Its leader is asked: a replica that has just come back may take
        itself for the leader, and what it is asked then gets no answer.
        """
        login, leader = pika.PlainCredentials(*ADMIN), self.nodes[self.leader(topic)]
        with pika.BlockingConnection(pika.ConnectionParameters(HOST, leader.port, credentials=login)) as reader:
            channel = reader.channel()
            read: list[PlainMessage] = []
            while (got := channel.basic_get(topic))[0] is not None:
                read.append(plain_message(got[1], got[2] or b""))
        return [read]

    def leader(self, topic: str) -> str:
        """The node that leads a queue; waits until all nodes name the same one."""
        named: set[str] = set()

        def is_agreed() -> bool:
            named.clear()
            named.update(_leader_by(node, topic) for node in self.nodes.values())
            return len(named) == 1 and named <= set(self.nodes)

        wait_for(is_agreed)
        return named.pop()

    def kill_leader(self, topic: str) -> None:
        """By SIGKILL."""
        self.nodes[self.leader(topic)].kill()

    def pause_leader(self, topic: str) -> None:
        """By SIGSTOP."""
        self.nodes[self.leader(topic)].pause()

    def kill(self) -> None:
        """End all nodes by SIGKILL."""
        for node in self.nodes.values():
            node.kill()

    def restore(self) -> None:
        """Let all nodes go on, and start those that were killed: a restarted node waits for others, so all at once."""
        for node in self.nodes.values():
            if node.is_started:
                node.resume()
        self._begin()

    def isolate(self, name: str) -> None:
        """Cut a node off from the other two, both ways. They learn of it at once, and connect again after `rejoin`."""
        for other in self.nodes:
            if other != name:
                self.nodes[other].control("eval", _with_cookie(name, "WRONG"))
                self.nodes[name].control("eval", _with_cookie(other, "WRONG"))

    def rejoin(self, name: str) -> None:
        """Undo `isolate`; returns when all nodes see each other."""
        for other in self.nodes:
            if other != name:
                self.nodes[other].control("eval", f"erlang:set_cookie('{name}', '{COOKIE}').")
                self.nodes[name].control("eval", f"erlang:set_cookie('{other}', '{COOKIE}').")
        for other in self.nodes:
            if other != name:
                self.nodes[other].control("eval", f"net_kernel:connect_node('{name}').")
        self._wait_until_whole()

    def stop(self) -> None:
        """End all. Idempotent."""
        self.kill()
        self._mapper.kill()
        for proxy in self._proxies:
            proxy.close()

    def _begin(self) -> None:
        begun = [node for node in self.nodes.values() if not node.is_started]
        for node in begun:
            node.begin()
        for node in begun:
            node.wait_until_served()
        self._wait_until_whole()

    def _wait_until_whole(self) -> None:
        for node in self.nodes.values():
            wait_for(lambda node=node: _sees(node, set(self.nodes)))  # type: ignore[misc]

    def _one(self) -> RabbitMqServer:
        return next(node for node in self.nodes.values() if node.is_started)

    def _queue(self, topic: str) -> dict[str, Any]:
        return _queue_by(self._one(), topic)

    def _url(self, ports: Any) -> str:
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        return f"rabbitmq://{USER}:{quote(PASSWORD, safe='')}@{hosts}"


def _queue_by(node: RabbitMqServer, topic: str) -> dict[str, Any]:
    """What a node knows of a queue, without the statistics that others have sent it."""
    found: dict[str, Any] = node.api("GET", f"queues/%2F/{quote(topic, safe='')}?disable_stats=true")
    return found


def _leader_by(node: RabbitMqServer, topic: str) -> str:
    """The leader of a queue as a node knows it; empty where it knows none."""
    with contextlib.suppress(ApiRefused):
        return str(_queue_by(node, topic).get("leader", ""))
    return ""


def _sees(node: RabbitMqServer, names: set[str]) -> bool:
    with contextlib.suppress(ApiRefused):
        return node.running_nodes() == names
    return False


def _membership(names: Sequence[str]) -> Mapping[str, object]:
    listed = {f"cluster_formation.classic_config.nodes.{number}": name for number, name in enumerate(names, start=1)}
    return {
        "cluster_formation.peer_discovery_backend": "classic_config",
        "cluster_formation.target_cluster_size_hint": len(names),
        **listed,
    }


def _with_cookie(node: str, cookie: str) -> str:
    return f"erlang:set_cookie('{node}', '{cookie}'), erlang:disconnect_node('{node}')."
