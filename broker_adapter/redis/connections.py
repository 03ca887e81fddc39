"""Connections to a Redis server or cluster: which node has a key, and commands sent together on one connection.

WAIT is about the writes of its own connection, so a script and its WAIT go over the same one; the client's pipeline for
clusters cannot do that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AskError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
)
from redis.retry import Retry

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.errors import CLIENT_ERRORS
from broker_adapter.redis.redis_options import database_of, login_settings
from broker_adapter.redis.sentinel_servers import open_sentinel_servers, refuse_sentinel_options
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

Command = Sequence[str | bytes | int]
Answer = Any
"""What the server answers to one command, or the error of class redis.exceptions.ResponseError."""

CONNECT_TIMEOUT_S_MAX: Final = 5.0
CONNECTIONS_MAX: Final = 2**16
NO_SLOTS: Final = "no slot has a node; redis-cli --cluster create gives them to nodes"


class Servers(Protocol):
    """The nodes of a server or a cluster, for one process. Thread-safe; connects at its first use.

    Raises exceptions of the client.
    """

    def node_of(self, key: str) -> redis.Redis:
        """The node that has this key."""

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """All nodes that take writes, with their addresses."""

    def redirected(self, error: ResponseError) -> redis.Redis | None:
        """The node that this answer names for one repetition with ASKING; None where the key's node is to be asked."""

    def refresh(self) -> bool:
        """Ask again which node has which key; whether another one may have it now."""

    def close(self) -> None:
        """Close all connections."""


class SingleServer:
    """One server, with or without replicas."""

    def __init__(self, client: redis.Redis, *, address: str) -> None:
        self._client = client
        self._address = address

    def node_of(self, key: str) -> redis.Redis:
        """The server."""
        return self._client

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """The server."""
        return [(self._address, self._client)]

    def redirected(self, error: ResponseError) -> redis.Redis | None:
        """Nowhere."""
        return None

    def refresh(self) -> bool:
        """There is no other node."""
        return False

    def close(self) -> None:
        """Close all connections."""
        self._client.connection_pool.disconnect()


class ClusterServers:
    """The masters of a cluster."""

    def __init__(self, open_cluster: Callable[[], RedisCluster]) -> None:
        self._open_cluster = open_cluster
        self._lock = threading.Lock()
        self._cluster: Any = None  # the client's class for clusters has no types
        self._importing: dict[str, Any] = {}

    def node_of(self, key: str) -> redis.Redis:
        """The master of the key's slot."""
        cluster = self._opened()
        return self._client_of(cluster.get_node_from_key(key))

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """All masters."""
        nodes = self._opened().get_primaries()
        if not nodes:
            raise RedisClusterException(NO_SLOTS)
        return [(node.name, self._client_of(node)) for node in nodes]

    def redirected(self, error: ResponseError) -> redis.Redis | None:
        """The node that a slot is being moved to."""
        if isinstance(error, MovedError) or not isinstance(error, AskError):
            return None
        cluster = self._opened()
        node = cluster.get_node(error.host, error.port)
        if node is None:  # it has no slot yet
            node = self._importing.setdefault(f"{error.host}:{error.port}", _cluster_node(error.host, error.port))
        return self._client_of(node)

    def refresh(self) -> bool:
        """Read the cluster's slots anew, from whichever node answers."""
        with contextlib.suppress(*CLIENT_ERRORS):
            manager = self._opened().nodes_manager
            _ask_for_slots(lambda: manager.initialize(disconnect_startup_nodes_pools=False))
        return True

    def close(self) -> None:
        """Close all connections."""
        if self._cluster is not None:
            self._cluster.close()
        for node in self._importing.values():
            if node.redis_connection is not None:
                node.redis_connection.close()

    def _client_of(self, node: Any) -> redis.Redis:
        client: redis.Redis = self._opened().get_redis_connection(node)
        return client

    def _opened(self) -> Any:
        with self._lock:
            if self._cluster is None:
                self._cluster = _ask_for_slots(self._open_cluster)
            return self._cluster


class ProcessServers:
    """The Servers of this process. A child gets connections of its own, never its parent's."""

    def __init__(self, open_servers: Callable[[], Servers]) -> None:
        self._open_servers = open_servers
        self._lock = threading.Lock()
        self._servers: Servers | None = None
        self._of_parents: list[Servers] = []
        self._closed = False
        reset_in_children(self)

    def own(self) -> Servers:
        """Those of this process. Raises ConfigurationError once closed."""
        notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if self._servers is None:
                self._servers = self._open_servers()
            return self._servers

    def close(self) -> None:
        """Close the connections of this process; idempotent."""
        notice_fork()
        with self._lock:
            self._closed = True
            servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()

    def reset_after_fork(self) -> None:
        """Open servers of its own in a forked child. The parent's are kept: freeing them would close connections."""
        self._lock = threading.Lock()
        if self._servers is not None:
            self._of_parents.append(self._servers)
            self._servers = None


def opener(url: BrokerUrl, *, timeout_ms: int, ca_file: str | None) -> Callable[[], Servers]:
    """Returns a function that opens the URL's servers. Raises ConfigurationError for options that cannot work."""
    is_cluster, is_sentinel = "+cluster" in url.scheme, "+sentinel" in url.scheme
    if not is_cluster and not is_sentinel and len(url.hosts) > 1:
        raise ConfigurationError(
            "redis:// names one server; several are the nodes of a cluster, redis+cluster://, or Sentinels, "
            "redis+sentinel://"
        )
    database = database_of(url, is_cluster=is_cluster)
    settings = {**_settings(url, timeout_ms=timeout_ms), **_tls_settings(url, ca_file=ca_file)}
    if is_sentinel:
        return open_sentinel_servers(url, settings, database=database)
    refuse_sentinel_options(list(url.options))
    if is_cluster:
        return lambda: ClusterServers(lambda: _open_cluster(url, settings))
    host, port = url.hosts[0]
    return lambda: SingleServer(redis.Redis(host=host, port=port, db=database, **settings), address=url.addresses)


def exchange(
    node: redis.Redis, groups: Sequence[Sequence[Command]], *, wait: Command | None, remaining_s: Callable[[], float]
) -> tuple[list[Answer], Answer]:
    """Send groups of commands together on one connection, and `wait`, a WAIT, behind them. Returns the answer to the
    last command of each group, and that to `wait`; an error of the server's is an answer.

    Where the connection breaks, or `remaining_s` runs out, that error stands for each answer that has not come. Where
    each group was refused, there is nothing to wait for: None. Raises exceptions of the client where it cannot connect.
    """
    pool = node.connection_pool
    connection: Any = pool.get_connection()
    answers: list[Answer] = []
    waited: Answer = None
    is_whole = False
    try:
        commands = [command for group in groups for command in group]
        connection.send_packed_command(connection.pack_commands([*commands, *([] if wait is None else [wait])]))
        for group in groups:
            *_, last = [_answer(connection, remaining_s()) for _ in group]
            answers.append(last)
        if wait is not None and not all(isinstance(answer, Exception) for answer in answers):
            waited = _answer(connection, remaining_s())
        is_whole = wait is None or waited is not None
    except CLIENT_ERRORS as error:
        answers += [error] * (len(groups) - len(answers))
        waited = error
    finally:  # an interrupt, too: an answer that is left would be taken for the next command's
        if not is_whole:
            connection.disconnect()
        pool.release(connection)
        # A former master keeps its connections; new ones may lead to its successor, by a name that moves.
        if any(isinstance(answer, ReadOnlyError) for answer in answers):
            pool.disconnect(inuse_connections=False)
    return answers, waited


def _answer(connection: Any, timeout_s: float) -> Answer:
    try:
        return connection.read_response(timeout=max(timeout_s, 0.001))
    except ResponseError as error:
        return error


def _open_cluster(url: BrokerUrl, settings: Mapping[str, Any]) -> RedisCluster:
    nodes = [_cluster_node(host, port) for host, port in url.hosts]
    return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **settings)


def _ask_for_slots(ask: Callable[[], Any]) -> Any:
    """Have the client ask which node has which slot: it fails by an IndexError where no slot has a node, and takes any
    refusal for that of a server without a cluster.
    """
    try:
        return ask()
    except IndexError as error:
        raise RedisClusterException(NO_SLOTS) from error
    except RedisClusterException as error:
        refusal = None if error.__cause__ is None else error.__cause__.__context__
        if isinstance(refusal, NoPermissionError):
            raise refusal from error
        raise


def _cluster_node(host: str, port: int) -> Any:
    node: Any = ClusterNode
    return node(host, port)


def _settings(url: BrokerUrl, *, timeout_ms: int) -> dict[str, Any]:
    """RESP2, no greeting and no repetition by the client: a publish has one deadline, which is ours."""
    return {
        **login_settings(url, user=url.user, password=url.password, option="password_file"),
        "socket_timeout": timeout_ms / 1000,
        "socket_connect_timeout": min(timeout_ms / 1000, CONNECT_TIMEOUT_S_MAX),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
        "max_connections": CONNECTIONS_MAX,
    }


def _tls_settings(url: BrokerUrl, *, ca_file: str | None) -> dict[str, Any]:
    if not url.scheme.startswith("rediss"):
        if ca_file or {"ca_file", "cert_file", "key_file"} & set(url.options):
            raise ConfigurationError("certificates are for TLS: use rediss://, rediss+cluster:// or rediss+sentinel://")
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": ca_file or url.file("ca_file"),
        "ssl_certfile": url.file("cert_file"),
        "ssl_keyfile": url.file("key_file"),
    }
