"""The examples of consumers on NATS and Redis: the effect happens once, whenever the consumer is killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from tests.broker_adapter.nats.nats_server import NatsServer, run_plain
from tests.broker_adapter.redis.redis_server import HOST, RedisServer, redis_server
from tests.examples.foreign_consumer import (
    DONE,
    GROUP,
    TOPIC,
    WAIT_SECONDS,
    ForeignConsumer,
    check_each_once,
    check_effect_after_failed_commit,
    check_one_effect,
    make_ticket_table,
    publish,
    running,
    wait_until,
)
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["sqlite_shop"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STREAM = f"outbox:{{{TOPIC}}}"
NATS_STREAM = "payments"
STEPS = sorted(DONE)
IDLE_MS = 3_600_000


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[str]:
    """A server's URL, with a stream that covers the topic."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    url = f"nats://{server.address}"
    run_plain([url], lambda client: client.jetstream().add_stream(name=NATS_STREAM, subjects=[TOPIC]))
    yield url
    server.kill()


@pytest.fixture
def redis_url() -> Iterator[tuple[RedisServer, str]]:
    """A durable server, and its URL."""
    with redis_server() as server:
        yield server, f"redis://{HOST}:{server.port}"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("program", ["nats_py.py", "faststream_nats.py"])
def test_a_consumer_of_nats_has_each_effect_once(sqlite_shop: Shop, nats_server: str, program: str, step: str) -> None:
    check_one_effect(sqlite_shop, nats_consumer(program, sqlite_shop, nats_server), step=step)


def test_faststream_on_nats_gets_a_message_again_whose_commit_failed(sqlite_shop: Shop, nats_server: str) -> None:
    check_effect_after_failed_commit(sqlite_shop, nats_consumer("faststream_nats.py", sqlite_shop, nats_server))


def nats_consumer(program: str, shop: Shop, server_url: str) -> ForeignConsumer:
    """An example that reads the stream."""
    database_url = shop.database.url.replace("sqlite://", "sqlite+aiosqlite://")
    return ForeignConsumer(
        program=(program,),
        environment={"DATABASE_URL": database_url, "NATS_URL": server_url, "NATS_STREAM": NATS_STREAM},
        broker_url=server_url,
        unsettled=lambda: run_plain([server_url], _unsettled_of_nats),
        expire=lambda: run_plain([server_url], _wait_a_second_for_acks),
    )


async def _unsettled_of_nats(client: Client) -> int:
    try:
        consumer = await client.jetstream().consumer_info(NATS_STREAM, GROUP)
    except NotFoundError:
        return (await client.jetstream().stream_info(NATS_STREAM)).state.messages
    return (consumer.num_pending or 0) + (consumer.num_ack_pending or 0)


async def _wait_a_second_for_acks(client: Client) -> None:
    """The server then looks at once for whose time is up."""
    info = await client.jetstream().consumer_info(NATS_STREAM, GROUP)
    await client.jetstream().add_consumer(NATS_STREAM, info.config, ack_wait=1)


@pytest.mark.parametrize("step", STEPS)
def test_a_consumer_of_redis_py_has_each_effect_once(
    sqlite_shop: Shop, redis_url: tuple[RedisServer, str], step: str
) -> None:
    check_one_effect(sqlite_shop, redis_consumer(("redis_py.py",), sqlite_shop, redis_url), step=step)


def redis_consumer(program: tuple[str, ...], shop: Shop, redis_url: tuple[RedisServer, str]) -> ForeignConsumer:
    """A program that acknowledges entries of the stream."""
    server, url = redis_url
    return ForeignConsumer(
        program=program,
        environment={"DATABASE_URL": shop.database.url, "REDIS_URL": url},
        broker_url=f"{url}/?wait=0",
        unsettled=lambda: _unsettled_of_stream(server),
        expire=lambda: _make_idle(server),
    )


def _unsettled_of_stream(server: RedisServer) -> int:
    with server.client as client:
        groups = client.xinfo_groups(STREAM)
        return sum(group["pending"] + group["lag"] for group in groups) if groups else client.xlen(STREAM)


def _make_idle(server: RedisServer) -> None:
    """As if nobody had done anything with what was read for an hour."""
    with server.client as client:
        for entry in client.xpending_range(STREAM, GROUP, "-", "+", count=100):
            options = {"min_idle_time": 0, "idle": IDLE_MS, "justid": True}
            client.xclaim(STREAM, GROUP, entry["consumer"], message_ids=[entry["message_id"]], **options)


READER = ("celery_redis.py",)
WORKER = ("celery", "-A", "celery_redis", "worker", "--concurrency=1")


@pytest.mark.parametrize("step", STEPS)
def test_a_task_of_celery_has_each_effect_once_though_its_worker_is_killed(
    sqlite_shop: Shop, redis_url: tuple[RedisServer, str], step: str
) -> None:
    worker = redis_consumer(WORKER, sqlite_shop, redis_url)

    with running(READER, worker.environment):
        check_one_effect(sqlite_shop, worker, step=step)


def test_a_task_of_celery_whose_commit_failed_is_enqueued_again(
    sqlite_shop: Shop, redis_url: tuple[RedisServer, str]
) -> None:
    worker = redis_consumer(WORKER, sqlite_shop, redis_url)

    with running(READER, worker.environment):
        check_effect_after_failed_commit(sqlite_shop, worker)


def test_a_task_of_celery_has_its_effect_once_though_the_reader_was_killed_before_it_was_enqueued(
    sqlite_shop: Shop, redis_url: tuple[RedisServer, str]
) -> None:
    worker, server = redis_consumer(WORKER, sqlite_shop, redis_url), redis_url[0]
    make_ticket_table(sqlite_shop)
    publish(worker.broker_url, range(3))

    with running(READER, worker.environment, moment="after_task_publish") as reader:
        assert reader.wait(WAIT_SECONDS) == -signal.SIGKILL
    left = _tasks(server)
    worker.expire()
    with running(READER, worker.environment) as reader, worker.running() as process:
        wait_until(lambda: worker.unsettled() == 0 and _tasks(server) == 0, reader, process)

    assert left == 1
    check_each_once(sqlite_shop, range(3))


def test_a_task_of_celery_that_waits_for_a_worker_is_enqueued_once(
    sqlite_shop: Shop, redis_url: tuple[RedisServer, str]
) -> None:
    worker, server = redis_consumer(WORKER, sqlite_shop, redis_url), redis_url[0]
    make_ticket_table(sqlite_shop)

    with running(READER, worker.environment) as reader:
        for order in range(3):
            publish(worker.broker_url, [order])
            wait_until(lambda order=order: _reads(server) == order + 1, reader)
            worker.expire()

        publish(worker.broker_url, [3])  # once it is read, the reader has looked for what is left after the expiry
        wait_until(lambda: _reads(server) == 4, reader)
        publish(worker.broker_url, [4])
        wait_until(lambda: _reads(server) == 5, reader)

        assert 4 <= _tasks(server) <= 5, "the fifth is read, and being enqueued"
        with worker.running() as process:
            wait_until(lambda: worker.unsettled() == 0 and _tasks(server) == 0, process)
    check_each_once(sqlite_shop, range(5))


def _reads(server: RedisServer) -> int:
    """How many entries of the stream the group was given."""
    with server.client as client:
        return sum(group["entries-read"] or 0 for group in client.xinfo_groups(STREAM))


def _tasks(server: RedisServer) -> int:
    """How many tasks wait in Celery's queue."""
    with server.client as client:
        return client.llen("tickets")
