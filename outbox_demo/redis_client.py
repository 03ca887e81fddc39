"""Opens redis-py's plain client for a URL: of one server, or of a cluster."""

from __future__ import annotations

from typing import Any

import redis

from broker_adapter.publishing.broker_url import BrokerUrl

UNREACHABLE = (redis.ConnectionError, redis.TimeoutError)
"""What the client raises while a server does not answer."""


def open_redis(url: BrokerUrl) -> Any:
    """Returns a client; the caller closes it."""
    options: dict[str, Any] = {"username": url.user, "password": url.password, "protocol": 2}
    if url.scheme.startswith("rediss"):
        options |= {"ssl": True, "ssl_ca_certs": url.file("ca_file"), "ssl_certfile": url.file("cert_file")}
        options["ssl_keyfile"] = url.file("key_file")
    if is_cluster(url):
        cluster: Any = redis.cluster
        nodes = [cluster.ClusterNode(host, port) for host, port in url.hosts]
        return cluster.RedisCluster(startup_nodes=nodes, **options)
    [(host, port)] = url.hosts
    return redis.Redis(host=host, port=port, db=int(url.path or 0), **options)


def is_cluster(url: BrokerUrl) -> bool:
    """Whether the URL names nodes of a cluster."""
    return "+cluster" in url.scheme
