"""What the inspection says of a server that is set weaker than promised: each weakness is made, seen, and cured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from outbox.migrate.schema_upgrade import upgrade
from outbox_core.common.errors import StorageFailed
from outbox_core.messages.broker_port import Broker, Inspectable, Weakness
from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, replica_of
from tests.fixtures.databases import Database
from tests.outbox.shop import Shop

Open = Callable[[str], Broker]
WAIT_SECONDS = 300
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def url_of(server: RedisServer, options: str, login: str = "") -> str:
    return f"redis://{login}{HOST}:{server.port}/?{options}"


def weaknesses(broker: Broker) -> tuple[Weakness, ...]:
    assert isinstance(broker, Inspectable)
    return broker.inspect(["t"]).weaknesses


@pytest.mark.parametrize(
    ("settings", "problem", "cure"),
    [
        ({"appendonly": "no"}, "last snapshot", "CONFIG SET appendonly yes"),
        ({"appendfsync": "everysec"}, "second before", "CONFIG SET appendfsync always"),
        ({"appendfsync": "no"}, "30 seconds", "CONFIG SET appendfsync always"),
        ({"no-appendfsync-on-rewrite": "yes"}, "rewritten", "CONFIG SET no-appendfsync-on-rewrite no"),
        ({"aof-load-truncated": "yes"}, "half a transaction", "CONFIG SET aof-load-truncated no"),
        ({"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}, "evicts streams", "maxmemory-policy noeviction"),
        ({"maxmemory": "1gb", "maxmemory-policy": "volatile-ttl"}, "evicts the ids", "maxmemory-policy noeviction"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_a_setting_that_can_lose_messages_is_named_with_its_cure(
    server: RedisServer, open_broker: Open, settings: dict[str, str], problem: str, cure: str
) -> None:
    broker = open_broker(url_of(server, "wait=0"))
    assert weaknesses(broker) == ()

    for name, value in settings.items():
        server.ask("CONFIG", "SET", name, value)
    [weakness] = weaknesses(broker)

    assert weakness.subject == f"node {HOST}:{server.port}"
    assert problem in weakness.problem
    assert cure in weakness.cure


def test_a_policy_that_can_never_apply_is_no_weakness(server: RedisServer, open_broker: Open) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

    assert weaknesses(open_broker(url_of(server, "wait=0"))) == ()


def test_one_copy_is_a_weakness_unless_the_url_says_that_it_is_enough(server: RedisServer, open_broker: Open) -> None:
    [weakness] = weaknesses(open_broker(url_of(server, "create=true")))

    assert "?wait=0" in weakness.cure
    assert weaknesses(open_broker(url_of(server, "wait=0"))) == ()
    [fewer] = weaknesses(open_broker(url_of(server, "wait=2")))
    assert "only 0 replicas" in fewer.problem


def test_replicas_make_waiting_for_them_the_strong_way(server: RedisServer, open_broker: Open) -> None:
    with replica_of(server):
        server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
        assert weaknesses(open_broker(url_of(server, "create=true"))) == ()
        [no_wait] = weaknesses(open_broker(url_of(server, "wait=0")))
        assert "a failover loses" in no_wait.problem

        server.ask("CONFIG", "SET", "min-replicas-to-write", 0)
        [cut_off] = weaknesses(open_broker(url_of(server, "wait=1")))
        assert "min-replicas-to-write 1" in cut_off.cure


def test_settings_that_may_not_be_read_are_a_weakness_and_the_rest_works(
    server: RedisServer, open_broker: Open
) -> None:
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~*", "+@all", "-config")
    broker = open_broker(url_of(server, "wait=0", login="app:word@"))

    [weakness] = weaknesses(broker)

    assert "appendfsync is unknown" in weakness.problem
    assert "+config|get" in weakness.cure
    assert broker.publish([message("t", 0)])[0].status is PublishStatus.STORED


def test_the_rights_that_the_guide_lists_are_enough(server: RedisServer, open_broker: Open) -> None:
    rights = "+eval +evalsha +wait +info +config|get +time +xadd +zadd +zscore +zrem +zcount +zremrangebyrank +pexpire"
    server.ask("ACL", "SETUSER", "app", "on", ">word", "~outbox:*", "-@all", *rights.split())
    broker = open_broker(url_of(server, "wait=0&strict=true", login="app:word@"))

    for _ in range(2):
        assert broker.publish([message("t", n) for n in range(3)])[2].status.is_success


def test_a_strict_broker_refuses_until_the_server_is_set_right(server: RedisServer, open_broker: Open) -> None:
    broker = open_broker(url_of(server, "wait=0&strict=true"))
    server.ask("CONFIG", "SET", "appendfsync", "everysec")

    with pytest.raises(StorageFailed, match="appendfsync always"):
        broker.publish([message("t", 0)])
    assert server.ask("EXISTS", "outbox:{t}") == 0

    server.ask("CONFIG", "SET", "appendfsync", "always")
    assert broker.publish([message("t", 0)])[0].status is PublishStatus.STORED


@pytest.mark.processes
def test_a_compensator_reports_a_weak_server_at_its_start_though_nothing_is_due(
    server: RedisServer, sqlite_shop: Shop
) -> None:
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    options = ["--url", sqlite_shop.database.url, "--broker", url_of(server, "wait=0")]
    command = [sys.executable, "-m", "outbox", "compensator", "run", *options]

    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        reported = next((line for line in process.stderr or () if "broker_durability_weak" in line), "")
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)

    assert "CONFIG SET appendfsync always" in reported


@pytest.mark.processes
def test_status_names_the_weaknesses_of_the_broker_and_ends_with_1_until_they_are_cured(
    server: RedisServer, sqlite: Database
) -> None:
    def status(*options: str) -> subprocess.CompletedProcess[str]:
        given = ["--url", sqlite.url, "--broker", url_of(server, "wait=0"), *options]
        command = [sys.executable, "-m", "outbox", "status", *given]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_SECONDS)

    upgrade(sqlite.url)
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    weak, weak_json = status("--topic", "t"), status("--json")
    server.ask("CONFIG", "SET", "appendfsync", "always")
    sound = status("--topic", "t")

    assert (weak.returncode, weak_json.returncode, sound.returncode) == (1, 1, 0), sound.stderr
    assert "CONFIG SET appendfsync always" in weak.stdout
    assert [one["subject"] for one in json.loads(weak_json.stdout)["broker"]["weaknesses"]] == [
        f"node {HOST}:{server.port}"
    ]
    assert "broker: Redis 7." in sound.stdout
