"""Reads the option --delay: the engine that keeps the scheduled messages of a run, with servers of the run or not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError, install_hint
from outbox_core.messages.url_parts import shown_url, split_url
from outbox_demo.delay_engine_port import DelayEngine
from outbox_demo.delay_service import DelayProcess
from outbox_demo.plan import RunTopics
from outbox_demo.processes import ProcessGroup

BOOKKEEPER: Final = "bookkeeper"
REDIS: Final = frozenset({"redis", "rediss", "redis+cluster", "rediss+cluster"})
STARTED: Final = ("redis:", "redis+cluster:", "bookkeeper:")
"""What the demo starts servers for."""


def open_delay_engine(
    choice: str | None, *, topics: RunTopics, folder: Path, processes: ProcessGroup, say: Callable[[str], None]
) -> DelayEngine:
    """Returns the engine for --delay, None: a delay service of one process. Raises ConfigurationError."""
    if choice is None:
        return DelayProcess(topics, folder=folder, processes=processes)
    if split_url(choice).scheme == BOOKKEEPER:
        return _delay_cluster(choice, topics=topics, folder=folder, processes=processes, say=say)
    if split_url(choice).scheme in REDIS:
        return _redis_timing(choice, topics=topics, folder=folder, processes=processes, say=say)
    raise ConfigurationError(
        f"--delay names an engine for which the demo starts servers, {', '.join(STARTED)}, or the URL of servers "
        f"that run, redis://HOST:6379 or bookkeeper://ZOOKEEPER:2181/PATH; not {shown_url(choice)!r}"
    )


def _redis_timing(
    choice: str, *, topics: RunTopics, folder: Path, processes: ProcessGroup, say: Callable[[str], None]
) -> DelayEngine:
    from outbox_demo.redis_servers import OwnRedis, OwnRedisCluster, RedisUnderDemo, RunningRedis
    from outbox_demo.redis_timing import RedisTiming

    redis: RedisUnderDemo
    match choice:
        case "redis:":
            redis = OwnRedis(folder=folder, processes=processes)
        case "redis+cluster:":
            redis = OwnRedisCluster(folder=folder, processes=processes)
        case _:
            redis = RunningRedis(choice)
    return RedisTiming(redis, name=topics.run, processes=processes, say=say)


def _delay_cluster(
    choice: str, *, topics: RunTopics, folder: Path, processes: ProcessGroup, say: Callable[[str], None]
) -> DelayEngine:
    for package in ("kazoo", "jpype"):
        if find_spec(package) is None:
            raise ConfigurationError(
                f"--delay bookkeeper: needs the package {package!r}, which comes with the extra 'bookkeeper': "
                f"{install_hint('bookkeeper')}"
            )
    from outbox_demo.bookkeeper_servers import BookKeeperUnderDemo, OwnBookKeeper, RunningBookKeeper
    from outbox_demo.delay_cluster import DelayCluster

    servers: BookKeeperUnderDemo
    if choice == "bookkeeper:":
        servers = OwnBookKeeper(folder=folder, processes=processes)
    else:
        servers = RunningBookKeeper(choice)
    return DelayCluster(servers, topics=topics, folder=folder, processes=processes, say=say)
