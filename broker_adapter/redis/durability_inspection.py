"""Finds settings of a Redis server by which an acknowledged message could be lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.exceptions import ReadOnlyError, ResponseError

from broker_adapter.publishing.treatment import Treatment
from broker_adapter.redis.connections import Servers
from broker_adapter.redis.errors import CODES, code_of
from broker_adapter.redis.redis_options import RedisOptions
from broker_adapter.redis.script_sender import Deadline, ScriptSender
from outbox_core.common.clock import Clock
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.broker_port import Weakness
from outbox_core.runtime.event_logger import EventLogger

BULK_BYTES_MAX_DEFAULT: Final = 512 * 1024 * 1024
VERSION_MIN: Final = (7, 0)
"""The first whose scripts declare that they write, so that a full or read-only server runs none of a script."""
CLOCK_MS_MAX: Final = 1_000
"""By how much the clock of a server with timers may differ from its client's."""
_SETTINGS: Final = (
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "aof-load-truncated",
    "min-replicas-to-write",
    "proto-max-bulk-len",
)
_LOST_WITH_FSYNC: Final[Mapping[str, str]] = {
    "everysec": "the machine's crash loses what was acknowledged in the second before, or two while the disk is slow",
    "no": "the machine's crash loses what the kernel had not written yet, commonly what was acknowledged in 30 seconds",
}
_HALF_TRANSACTION: Final = (
    "a crash in the middle of a write leaves half a transaction in the append-only file; after a second crash messages "
    "stand there twice, or what was acknowledged between the two is lost"
)
_NO_HALF_TRANSACTION: Final = (
    "CONFIG SET aof-load-truncated no, and in redis.conf; if the server then does not start after a crash, run "
    "redis-check-aof --fix"
)
logger: EventLogger = EventLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterReport:
    """One node that takes writes, as it says itself. `replicas`: how many are connected and in step; `eviction`: the
    weakness by which whole keys are removed.
    """

    version: str
    replicas: int
    bulk_bytes_max: int
    weaknesses: tuple[Weakness, ...]
    eviction: Weakness | None


def inspect_master(
    address: str, node: redis.Redis, *, replicas_wanted: int | None, has_timers: bool, clock: Clock
) -> MasterReport:
    """Ask one node; changes nothing. `replicas_wanted`: what the URL says, None where it says nothing.

    Raises exceptions of the client; ReadOnlyError where the node is a replica.
    """
    info: Mapping[str, Any] = {}
    asked_at_ms = clock.now_ms()
    for section in ("server", "memory", "persistence", "replication"):
        info = {**info, **node.info(section)}
    if info.get("role") == "slave":  # what it says of replicas is no master's; a name may lead to that by now
        node.connection_pool.disconnect(inuse_connections=False)
        raise ReadOnlyError("READONLY it is a replica, and no master any more")
    ahead_ms = clock_ahead_ms(info, asked_at_ms=asked_at_ms, answered_at_ms=clock.now_ms())
    settings = _settings(node)
    replicas = _replicas_online(info)
    eviction = list(_of_memory(info, has_timers=has_timers))
    problems = [
        *_of_version(info),
        *_of_persistence(info, settings),
        *eviction,
        *_of_replication(settings, replicas=replicas, replicas_wanted=replicas_wanted),
        *(_of_clock(ahead_ms) if has_timers else ()),
    ]
    weaknesses = [Weakness(subject=f"node {address}", problem=problem, cure=cure) for problem, cure in problems]
    return MasterReport(
        version=str(info.get("redis_version", "")),
        replicas=replicas,
        bulk_bytes_max=int(settings.get("proto-max-bulk-len", BULK_BYTES_MAX_DEFAULT)),
        weaknesses=tuple(weaknesses),
        eviction=next((weakness for weakness in weaknesses if (weakness.problem, weakness.cure) in eviction), None),
    )


def _settings(node: redis.Redis) -> Mapping[str, str]:
    """The settings that INFO does not show; none where CONFIG is forbidden, or unknown to a managed service."""
    try:
        settings: Any = node.config_get(*_SETTINGS)
    except ResponseError as error:
        if CODES.get(code_of(error)) is Treatment.NOT_AUTHORIZED or code_of(error) == "ERR":
            return {}
        raise
    return {_text(name): _text(setting) for name, setting in settings.items()}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _replicas_online(info: Mapping[str, Any]) -> int:
    replicas = [replica for name, replica in info.items() if name.startswith("slave") and isinstance(replica, dict)]
    return sum(replica.get("state") == "online" for replica in replicas)


def _of_version(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < VERSION_MIN:
        yield f"version {version} cannot run the script that appends", "install Redis 7.0 or later"


def _of_persistence(info: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if not info.get("aof_enabled"):
        yield (
            "without appendonly a crash loses all that was acknowledged since the last snapshot",
            "CONFIG SET appendonly yes, and appendonly yes in redis.conf",
        )
    elif "appendfsync" not in settings:
        yield (
            "CONFIG GET is forbidden here, so appendfsync is unknown: a crash may lose what was acknowledged last",
            "allow it: ACL SETUSER <user> +config|get",
        )
    elif settings["appendfsync"] != "always":
        yield (_LOST_WITH_FSYNC[settings["appendfsync"]], "CONFIG SET appendfsync always, and in redis.conf")
    elif settings.get("no-appendfsync-on-rewrite") == "yes":
        yield (
            "while the append-only file is rewritten nothing is synced, and a crash loses what was acknowledged then",
            "CONFIG SET no-appendfsync-on-rewrite no, and in redis.conf",
        )
    # The effects of a script are one transaction in the file. Redis 7.0 leaves the first half of a torn one there and
    # appends behind it: the next load runs both as one, or drops both where no EXEC follows (valkey-io/valkey 4342).
    if info.get("aof_enabled") and settings.get("aof-load-truncated") == "yes":
        yield (_HALF_TRANSACTION, _NO_HALF_TRANSACTION)


def _of_memory(info: Mapping[str, Any], *, has_timers: bool) -> Iterator[tuple[str, str]]:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy == "noeviction" or not info.get("maxmemory"):
        return
    if has_timers:
        evicted = "all messages of a slot at once"
    else:
        evicted = "streams with messages" if policy.startswith("allkeys") else "the ids by which repeats are known"
    yield f"maxmemory-policy {policy} evicts {evicted}", "CONFIG SET maxmemory-policy noeviction, and in redis.conf"


def clock_ahead_ms(info: Mapping[str, Any], *, asked_at_ms: int, answered_at_ms: int) -> int:
    """Returns how far a server's clock is ahead of ours, which showed these times before and after it answered `info`;
    negative: behind. 0 up to a second.
    """
    server_ms = int(info.get("server_time_usec", answered_at_ms * 1_000)) // 1_000
    ahead_ms = max(0, server_ms - answered_at_ms) - max(0, asked_at_ms - server_ms)
    return ahead_ms if abs(ahead_ms) > CLOCK_MS_MAX else 0


def _of_clock(ahead_ms: int) -> Iterator[tuple[str, str]]:
    shown = f"its clock is {abs(ahead_ms) / 1_000:,.1f} s"
    cure = "keep the clocks in step, by NTP"
    if ahead_ms > 0:
        yield f"{shown} ahead of this machine's: deliveries expire too soon, and come again", cure
    elif ahead_ms < 0:
        yield f"{shown} behind this machine's: scheduled messages are late by that", cure


def _of_replication(
    settings: Mapping[str, str], *, replicas: int, replicas_wanted: int | None
) -> Iterator[tuple[str, str]]:
    if replicas_wanted is None and replicas == 0:
        yield (
            "no replica is connected, so what was acknowledged is lost with this node's disk",
            "connect a replica (REPLICAOF), or say ?wait=0 in the broker's URL where one copy is enough",
        )
    elif replicas_wanted is not None and replicas < replicas_wanted:
        yield (
            f"?wait={replicas_wanted} and only {replicas} replicas are connected: nothing is acknowledged",
            "start replicas",
        )
    elif replicas > 0 and replicas_wanted == 0:
        yield (
            "with ?wait=0 a failover loses what was acknowledged and its replica had not got",
            "say ?wait=1 in the broker's URL, or leave it out",
        )
    if replicas > 0 and settings.get("min-replicas-to-write") == "0":
        yield (
            "a master that was cut off from its replicas goes on taking writes that a failover loses",
            "CONFIG SET min-replicas-to-write 1, and in redis.conf",
        )


class MasterSettings:
    """Keeps the masters' last reports of their settings, on which publishes depend. Thread-safe. Raises BrokerError
    where the masters cannot be asked.
    """

    def __init__(self, sender: ScriptSender, options: RedisOptions, *, clock: Clock) -> None:
        self._sender = sender
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas = options.replicas
        self._eviction: Weakness | None = None
        self.bulk_bytes_max = BULK_BYTES_MAX_DEFAULT

    def ask(self, deadline: Deadline) -> list[MasterReport]:
        """Inspect each master, and remember what publishes have to know."""
        reports = self._sender.until_answered(self._master_reports, deadline)
        self._learn(reports)
        return reports

    def replicas_to_wait_for(self, deadline: Deadline) -> int:
        """Returns how many replicas must have a message before it is acknowledged; asks the masters the first time."""
        if self._replicas is None:
            self.ask(deadline)
        return self._replicas or 0

    def refuse_eviction(self, deadline: Deadline) -> None:
        """Raise StorageFailed while a master may remove whole keys; asks again whether that was cured."""
        if self._eviction is not None:
            self.ask(deadline)
        if self._eviction is not None:
            raise StorageFailed(f"refused, since what is accepted would be lost: {self._eviction}")

    def _master_reports(self, servers: Servers) -> list[MasterReport]:
        options = self._options
        return [
            inspect_master(
                address, node, replicas_wanted=options.replicas, has_timers=options.has_timers, clock=self._clock
            )
            for address, node in servers.masters()
        ]

    def _learn(self, reports: Sequence[MasterReport]) -> None:
        """Remember what publishes must know. The number to wait for never falls: a replica that is lost is an outage
        of durability, which must not pass for a server that never had one.
        """
        with self._lock:
            self.bulk_bytes_max = min(report.bulk_bytes_max for report in reports)
            self._eviction = next((report.eviction for report in reports if report.eviction is not None), None)
            if self._options.replicas is not None:
                return
            known_replicas, connected = self._replicas, int(any(report.replicas for report in reports))
            self._replicas = max(connected, known_replicas or 0)
        if self._replicas != known_replicas:
            extra = {"replicas": self._replicas, "addresses": self._sender.addresses}
            logger.info("redis_waits_for_replicas", extra=extra)
