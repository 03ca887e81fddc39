"""The main job on RocketMQ: everything is killed but the servers, and the run leaves no topic or group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message
from outbox_demo.foreign_client_port import open_client
from outbox_demo.plan import RunTopics
from tests.engines.fault_conformance import is_taken
from tests.engines.outbox_load import wait_for
from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.fixtures.local_server import guarded
from tests.outbox_demo.foreign_demo import check_main_job

MESSAGES = 2_000
"""Of each topic: more than a consumer reads while they are removed, so that it never waits."""
READER = """
import sys
from outbox_demo.foreign_client_port import open_client
from outbox_demo.plan import NOTIFICATION, RunTopics

for _ in open_client(sys.argv[1], RunTopics(sys.argv[2])).deliveries(NOTIFICATION):
    print("read", flush=True)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where RocketMQ's client logs."""
    monkeypatch.setenv("HOME", str(tmp_path))


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    cluster: RocketMqCluster, tmp_path: Path
) -> None:
    check_main_job(tmp_path / "run", cluster.url())

    assert left(cluster) == []


def test_a_run_leaves_no_group_though_a_consumer_asks_for_messages_while_it_is_removed(
    cluster: RocketMqCluster,
) -> None:
    topics = RunTopics.of_new_run()
    client = open_client(cluster.url(), topics)
    client.make_topics()
    publish(cluster, topics)

    with reading(cluster, topics) as lines:
        assert lines.readline() == "read\n"
        client.remove_topics()

    assert left(cluster) == []


def publish(cluster: RocketMqCluster, topics: RunTopics) -> None:
    """MESSAGES of each topic."""
    with closing(connect(f"{cluster.url()}&timeout_ms=60000")) as broker:
        for topic in topics.names:
            batch = [Message(id=f"m{number}", topic=topic, body=b"x") for number in range(MESSAGES)]
            wait_for(partial(is_taken, broker, batch[0]))
            for begin in range(0, MESSAGES, 500):
                assert all(one.status.is_success for one in broker.publish(batch[begin : begin + 500]))


@contextmanager
def reading(cluster: RocketMqCluster, topics: RunTopics) -> Iterator[IO[str]]:
    """A consumer of the demo's, which writes a line for each message, for the length of a block."""
    command = [sys.executable, "-c", READER, cluster.url(), topics.run]
    with subprocess.Popen(guarded(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout
        finally:
            process.kill()


def left(cluster: RocketMqCluster) -> list[str]:
    """Topics and groups of a run."""
    return [name for name in cluster.client.names() if name.startswith("outbox-demo-")]
