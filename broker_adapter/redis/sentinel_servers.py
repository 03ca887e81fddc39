"""The master that Sentinels name: one server, and after a failover its successor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis
from redis.exceptions import ResponseError
from redis.sentinel import Sentinel

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.redis.errors import CLIENT_ERRORS
from broker_adapter.redis.redis_options import SENTINEL_OPTIONS, login_settings
from outbox_core.common.errors import ConfigurationError

SENTINEL_TIMEOUT_S_MAX: Final = 1.0
"""For one Sentinel: the others are asked within the time of the same call."""

Address = tuple[str, int]


class SentinelServers:
    """Implements Servers. Sentinels are asked at the first use, and again whenever the master does not serve."""

    def __init__(self, find_master: Callable[[], Address], open_master: Callable[[str, int], redis.Redis]) -> None:
        self._find_master = find_master
        self._open_master = open_master
        self._lock = threading.Lock()
        self._known: tuple[Address, redis.Redis] | None = None

    def node_of(self, key: str) -> redis.Redis:
        """The master."""
        return self._current()[1]

    def masters(self) -> list[tuple[str, redis.Redis]]:
        """The master."""
        (host, port), master = self._current()
        return [(f"{host}:{port}", master)]

    def redirected(self, error: ResponseError) -> redis.Redis | None:
        """Nowhere: the master has all keys."""
        return None

    def refresh(self) -> bool:
        """Ask the Sentinels again; until they agree on another master, the former one remains."""
        with contextlib.suppress(*CLIENT_ERRORS):
            self._follow(self._find_master())
        return True

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            master, self._known = self._known, None
        if master is not None:
            master[1].connection_pool.disconnect()

    def _current(self) -> tuple[Address, redis.Redis]:
        with self._lock:
            if self._known is not None:
                return self._known
        return self._follow(self._find_master())

    def _follow(self, address: Address) -> tuple[Address, redis.Redis]:
        """Use the server at this address from now on. Calls in progress end on their own connections."""
        with self._lock:
            former = self._known
            if former is not None and former[0] == address:
                return former
            self._known = current = (address, self._open_master(*address))
        if former is not None:
            former[1].connection_pool.disconnect(inuse_connections=False)
        return current


def open_sentinel_servers(
    url: BrokerUrl, settings: Mapping[str, Any], *, database: int
) -> Callable[[], SentinelServers]:
    """Returns a function that opens the master of a URL's Sentinels. `settings`: of the client, for the master; user
    and password of the Sentinels are options of the URL. Raises ConfigurationError.
    """
    name = url.options.get("master")
    if not name:
        raise ConfigurationError(
            "the URL of Sentinels names the master that they watch: redis+sentinel://s1,s2,s3/?master=mymaster"
        )
    timeout_s = min(settings["socket_timeout"], SENTINEL_TIMEOUT_S_MAX)
    of_sentinels = {
        **settings,
        **login_settings(url, user=url.options.get("sentinel_user"), password=None, option="sentinel_password_file"),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }

    def open_servers() -> SentinelServers:
        make: Any = Sentinel  # the client's class has no types
        sentinel = make(list(url.hosts), sentinel_kwargs=of_sentinels)
        return SentinelServers(
            lambda: sentinel.discover_master(name),
            lambda host, port: redis.Redis(host=host, port=port, db=database, **settings),
        )

    return open_servers


def refuse_sentinel_options(options: Sequence[str]) -> None:
    """Raise ConfigurationError where the URL of another scheme has an option of Sentinels."""
    for name in sorted(SENTINEL_OPTIONS & set(options)):
        raise ConfigurationError(f"{name} in the URL is about Sentinels: use redis+sentinel:// or rediss+sentinel://")
