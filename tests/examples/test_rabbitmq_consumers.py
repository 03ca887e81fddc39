"""The examples of consumers on RabbitMQ: the effect happens once, whenever the consumer is killed."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from tests.broker_adapter.http.test_tls import certificate
from tests.broker_adapter.rabbitmq.rabbitmq_server import ADMIN, HOST, RabbitMqServer
from tests.examples.foreign_consumer import (
    DONE,
    GROUP,
    TOPIC,
    ForeignConsumer,
    check_effect_after_failed_commit,
    check_one_effect,
    marks,
)
from tests.fixtures.local_server import scratch_folder
from tests.outbox.shop import Shop
from tests.outbox.shop_fixtures import sqlite_shop

__all__ = ["sqlite_shop"]

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXCHANGE = "amq.direct"
ALL_MESSAGES = "all-messages"
QUEUE_OF_CELERY = "celery"
QUORUM = {"x-queue-type": "quorum"}
STEPS = sorted(DONE)
PIKA = ("pika_consumer.py",)
FASTSTREAM = ("faststream_rabbitmq.py",)
CELERY = ("celery", "-A", "celery_rabbitmq", "worker", "--concurrency=1")
PROGRAMS = [
    pytest.param(program, id=name) for name, program in (("pika", PIKA), ("faststream", FASTSTREAM), ("celery", CELERY))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMqServer]:
    """A server for all tests here."""
    with tempfile.TemporaryDirectory(dir=scratch_folder(), ignore_cleanup_errors=True) as folder:
        tls = certificate(tmp_path_factory.mktemp("tls"), address=HOST)
        server = RabbitMqServer(Path(folder) / "server", tls=tls)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def login(server: RabbitMqServer) -> Iterator[str]:
    """A virtual host of the test's own with the group's queue, as `user:password@host:port/vhost`."""
    vhost = f"v{uuid.uuid4().hex}"
    user, password = ADMIN
    server.api("PUT", f"vhosts/{vhost}")
    server.api("PUT", f"permissions/{vhost}/{user}", configure=".*", write=".*", read=".*")
    login = f"{user}:{password}@{HOST}:{server.port}/{vhost}"
    with pika.BlockingConnection(pika.URLParameters(f"amqp://{login}")) as connection:
        channel = connection.channel()
        for queue in (GROUP, ALL_MESSAGES):
            channel.queue_declare(queue, durable=True, arguments=QUORUM)
            channel.queue_bind(queue, EXCHANGE, routing_key=TOPIC)
    yield login
    server.api("DELETE", f"vhosts/{vhost}")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_consumer_of_rabbitmq_has_each_effect_once(
    sqlite_shop: Shop, login: str, program: tuple[str, ...], step: str
) -> None:
    check_one_effect(sqlite_shop, rabbitmq_consumer(program, sqlite_shop, login), step=step)


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_a_framework_on_rabbitmq_gets_a_message_again_whose_commit_failed(
    sqlite_shop: Shop, login: str, program: tuple[str, ...]
) -> None:
    check_effect_after_failed_commit(sqlite_shop, rabbitmq_consumer(program, sqlite_shop, login))


def rabbitmq_consumer(program: tuple[str, ...], shop: Shop, login: str) -> ForeignConsumer:
    """An example that reads the group's queue."""
    url = shop.database.url
    if program == FASTSTREAM:
        url = url.replace("sqlite://", "sqlite+aiosqlite://")
    return ForeignConsumer(
        program=program,
        environment={"DATABASE_URL": url, "RABBITMQ_URL": f"amqp://{login}", "QUEUE": GROUP},
        broker_url=f"rabbitmq://{login}?exchange={EXCHANGE}",
        unsettled=lambda: _unsettled(shop, login),
    )


def _unsettled(shop: Shop, login: str) -> int:
    """Those that wait in queues, and those that have no mark: AMQP tells nothing of what is not acknowledged."""
    with pika.BlockingConnection(pika.URLParameters(f"amqp://{login}")) as connection:
        channel = connection.channel()
        waiting = _waiting(channel, GROUP)
        published = _waiting(channel, ALL_MESSAGES)
        with contextlib.suppress(ChannelClosedByBroker):  # Celery alone declares it
            waiting += _waiting(channel, QUEUE_OF_CELERY)
    return waiting + published - len(marks(shop))


def _waiting(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)
