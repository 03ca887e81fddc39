"""Three servers of NATS of the tests' own that form a cluster, each behind a proxy, and so each link between two."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from nats.aio.client import Client
from nats.errors import Error as ClientError
from nats.js.api import StreamConfig

from outbox_demo.ports import free_port
from tests.broker_adapter.nats.nats_server import HOST, NatsServer, name_of, read_stream, run_plain
from tests.broker_adapter.publishing.engine_under_test import PlainMessage
from tests.engines.engine_under_fault import used_proxy
from tests.engines.java_server import own_loopback_network
from tests.fixtures.cutting_tcp_proxy import CuttingTcpProxy

T = TypeVar("T")

NAMES: Final = ("n1", "n2", "n3")
WAIT_SECONDS: Final = 300
POLL_SECONDS: Final = 0.02


class NatsCluster:
    """An EngineUnderFault. Topics are streams with a copy on each server."""

    copies_per_publish_max = 1

    def __init__(self, folder: Path) -> None:
        # Between the servers on a network of their own, where nobody takes a port before the server that it is for.
        network = own_loopback_network()
        places = {name: (host := f"{network}.{number}", free_port(host)) for number, name in enumerate(NAMES, start=1)}
        self._links = {
            (one, other): CuttingTcpProxy(places[other][1], host=places[other][0])
            for one, other in itertools.permutations(NAMES, 2)
        }
        self.servers: Mapping[str, NatsServer] = {
            name: NatsServer(
                folder / name, settings={"server_name": name, "cluster": self._routes(name, *places[name])}
            )
            for name in NAMES
        }
        self._proxies = {name: CuttingTcpProxy(server.port) for name, server in self.servers.items()}
        self._alive: set[str] = set()

    @property
    def url(self) -> str:
        """Of all servers, through their proxies."""
        return "nats://" + ",".join(f"{HOST}:{proxy.port}" for proxy in self._proxies.values())

    @property
    def proxies(self) -> Sequence[CuttingTcpProxy]:
        """One a server."""
        return list(self._proxies.values())

    def proxy_in_use(self, topic: str) -> CuttingTcpProxy:
        """The client has one connection."""
        return used_proxy(self.proxies)

    def proxy_of(self, name: str) -> CuttingTcpProxy:
        """That of a server."""
        return self._proxies[name]

    def make_ordered_topic(self, topic: str) -> None:
        """A stream with a copy on each server."""
        self.make_stream(name_of(topic), subject=topic, copies=len(NAMES))

    def make_stream(self, name: str, *, subject: str, copies: int) -> None:
        """Make a stream, and wait until it has a leader."""
        config = StreamConfig(name=name, subjects=[subject], num_replicas=copies)
        self._until_done(lambda client: client.jetstream().add_stream(config))
        self.leader(subject, name=name)

    def read_partitions(self, topic: str) -> list[list[PlainMessage]]:
        """The stream's messages."""

        async def read(client: Client) -> list[PlainMessage]:
            state = (await client.jetstream().stream_info(name_of(topic))).state
            return await read_stream(client, topic, count=state.messages)

        return [self._until_done(read)]

    def leader(self, topic: str, *, name: str | None = None) -> str:
        """The server that leads a topic's stream; waits for one."""

        async def ask(client: Client) -> str:
            cluster = (await client.jetstream().stream_info(name or name_of(topic))).cluster
            if cluster is None or not cluster.leader:
                raise ClientError
            return cluster.leader

        return self._until_done(ask)

    def kill_leader(self, topic: str) -> None:
        """By SIGKILL."""
        self.kill(self.leader(topic))

    def pause_leader(self, topic: str) -> None:
        """By SIGSTOP."""
        self.servers[self.leader(topic)].pause()

    def kill(self, *names: str) -> None:
        """End servers by SIGKILL; all where none is named."""
        for name in names or NAMES:
            self.servers[name].kill()
            self._alive.discard(name)

    def restore(self) -> None:
        """Start what was killed, let go on what was paused, mend all links; returns when the cluster has a leader."""
        for link in self._links.values():
            link.heal()
        for name, server in self.servers.items():
            if name in self._alive:
                server.resume()
            else:
                server.start()
                self._alive.add(name)
        self._until_done(lambda client: client.jetstream().account_info())

    def isolate(self, name: str) -> None:
        """Cut a server off from the other two, both ways, until `restore`. Its clients reach it."""
        for link, proxy in self._links.items():
            if name in link:
                proxy.partition()

    def stop(self) -> None:
        """End all. Idempotent."""
        self.kill()
        for proxy in (*self._proxies.values(), *self._links.values()):
            proxy.close()

    def _routes(self, name: str, host: str, port: int) -> Mapping[str, object]:
        """Each server reaches each other one by a link of its own."""
        routes = [f"nats://{HOST}:{self._links[name, other].port}" for other in NAMES if other != name]
        return {"name": "c", "listen": f"{host}:{port}", "routes": routes, "no_advertise": True}

    def _until_done(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Do something by a plain client, again while the cluster has no leader."""
        addresses = [f"nats://{server.address}" for server in self.servers.values()]
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return run_plain(addresses, work)
            except (ClientError, TimeoutError, OSError):
                assert time.monotonic() < deadline
                threading.Event().wait(POLL_SECONDS)
