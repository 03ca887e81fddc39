"""`outbox compensator run --timing URL`: as people start it, and what ends a start."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from broker_adapter.embedded import EmbeddedBroker
from compensator.core.config import load
from compensator.entry.composition import wire
from outbox_core import SystemClock
from outbox_core.common.errors import ConfigurationError
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.timers.timer_workers import held, move, opened, store_url, timer
from tests.fixtures.fork_server import environment, fork_server
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

WAIT_SECONDS = 300


def database(shop: Shop) -> list[str]:
    return ["--url", shop.database.url, *(["--schema", shop.database.schema] if shop.database.schema else [])]


def command(shop: Shop, broker: str, store: str) -> list[str]:
    return ["compensator", "run", *database(shop), "--broker", broker, "--timing", store]


def delay_command(shop: Shop, broker: str, store: str) -> list[str]:
    return ["delay", "serve", "--store", store, *database(shop), "--target", broker]


@pytest.mark.processes
@pytest.mark.parametrize("command", [command, delay_command])
def test_the_service_fires_timers_until_it_is_stopped(
    mysql_shop: Shop, server: RedisServer, tmp_path: Path, command: Callable[[Shop, str, str], list[str]]
) -> None:
    url, broker_url = store_url(server), f"embedded:{tmp_path / 'data'}"
    box = mysql_shop.box(PromptBroker(), timing=url)
    with box.begin():
        message = box.publish("reminder", {}, delay=timedelta(hours=1))
    assert box.close()

    with fork_server().start("outbox", *command(mysql_shop, broker_url, url), env=environment()) as process:
        with opened(url) as store:
            assert wait_until(lambda: all(one.complete for one in store.figures()) and held(store) == (1, 0))
            move(mysql_shop, in_ms=0)
            store.add([timer(mysql_shop, message.id)])
            assert wait_until(lambda: not mysql_shop.rows() and held(store) == (0, 0))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0

    broker = EmbeddedBroker(broker_url)
    assert [one.id for one in broker.pull("reminder", "mail")] == [message.id]
    broker.close()


@pytest.mark.processes
def test_a_store_that_may_evict_ends_the_start_with_the_cure(
    sqlite_shop: Shop, server: RedisServer, tmp_path: Path
) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

    arguments = command(sqlite_shop, f"embedded:{tmp_path / 'data'}", store_url(server))
    done = fork_server().run("outbox", *arguments, env=environment(COLUMNS="200"))

    assert done.returncode != 0
    assert "maxmemory-policy noeviction" in done.stderr


def test_two_sources_may_not_have_one_store(tmp_path: Path) -> None:
    file = tmp_path / "outbox.toml"
    file.write_text(
        '[broker]\nurl = "memory:"\n[timing]\nstore = "redis://127.0.0.1:1/?name=shop"\n'
        '[[compensator.sources]]\nurl = "sqlite:///a.db"\n[[compensator.sources]]\nurl = "sqlite:///b.db"\n'
    )

    with pytest.raises(ConfigurationError, match=r"another \?name="):
        wire(load({}, file=file), clock=SystemClock())


def test_each_source_may_have_a_store_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "outbox.toml"
    file.write_text(
        '[broker]\nurl = "memory:"\n[timing]\nrebuild_rows_per_second = 9\n'
        '[[compensator.sources]]\nurl = "sqlite:///a.db"\ntiming = "redis://127.0.0.1:1/?name=a"\n'
        '[[compensator.sources]]\nurl = "sqlite:///b.db"\n'
    )

    parts = wire(load({}, file=file), clock=SystemClock())
    assert [one.source for one in parts.timers] == [parts.sources[0].name]
    parts.close()
