"""Three servers with three copies of a stream: its leader is killed under load, and nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import Error as JetStreamError

from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.connect import connect
from outbox_core.messages.inspection import Inspectable
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.nats.nats_server import HOST, NatsServer, read_stream, run_plain
from tests.engines.java_server import free_port

WAIT_SECONDS = 300
STORED = {PublishStatus.STORED, PublishStatus.DUPLICATE}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, NatsServer]]:
    """Three servers, by their names."""
    ports = {name: free_port(HOST) for name in ("n1", "n2", "n3")}
    routes = [f"nats://{HOST}:{port}" for port in ports.values()]
    servers = {
        name: NatsServer(
            tmp_path / name,
            settings={"server_name": name, "cluster": {"name": "c", "listen": f"{HOST}:{port}", "routes": routes}},
        )
        for name, port in ports.items()
    }
    for server in servers.values():
        server.start()
    yield servers
    for server in servers.values():
        server.kill()


def addresses(cluster: dict[str, NatsServer]) -> list[str]:
    return [f"nats://{server.address}" for server in cluster.values()]


async def make_stream(client: Client, name: str, *, copies: int) -> None:
    """Make a stream; the cluster may still be choosing its leader."""
    config = StreamConfig(name=name, subjects=[f"{name}.>"], num_replicas=copies)
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            await client.jetstream().add_stream(config)
            return
        except (JetStreamError, TimeoutError):
            assert time.monotonic() < deadline


async def leader_of(client: Client, name: str) -> str:
    """The server that leads a stream."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        cluster = (await client.jetstream().stream_info(name)).cluster
        if cluster is not None and cluster.leader:
            return cluster.leader
    raise TimeoutError(f"stream {name} got no leader")


@pytest.mark.slow
def test_a_streams_leader_is_killed_under_load_and_the_gap_is_ridden_over(cluster: dict[str, NatsServer]) -> None:
    servers = addresses(cluster)
    run_plain(servers, lambda client: make_stream(client, "R3", copies=3))
    run_plain(servers, lambda client: make_stream(client, "R1", copies=1))
    hosts = ",".join(server.address for server in cluster.values())
    broker = connect(f"nats://{hosts}?timeout_ms=20000")
    assert isinstance(broker, Inspectable)
    assert [one.subject for one in broker.inspect(["R3.t", "R1.t"]).weaknesses] == ["stream R1"]
    acknowledged: list[str] = []
    gaps_s: list[float] = []
    outages: list[BrokerUnavailable] = []
    many, done = threading.Event(), threading.Event()

    def publish() -> None:
        for number in itertools.count(0, 50):
            batch = [Message(id=f"m{n:06d}", topic="R3.t", body=b"x" * 512) for n in range(number, number + 50)]
            begun = time.monotonic()
            try:
                results = broker.publish(batch)
            except BrokerUnavailable as error:
                outages.append(error)
                continue
            gaps_s.append(time.monotonic() - begun)
            acknowledged.extend(one.id for one in results if one.status in STORED)
            if len(acknowledged) >= 1_000:
                many.set()
            if done.is_set():
                return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert many.wait(WAIT_SECONDS)
        leader = run_plain(servers, lambda client: leader_of(client, "R3"))
        cluster[leader].kill()
        before, deadline = len(acknowledged), time.monotonic() + WAIT_SECONDS
        while len(acknowledged) < before + 1_000:
            assert time.monotonic() < deadline, outages
            time.sleep(0.01)
    finally:
        done.set()
        thread.join(WAIT_SECONDS)
        broker.close()
    cluster[leader].start()
    read = Counter(
        one.id for one in run_plain(servers, lambda client: read_stream(client, "R3.t", count=len(acknowledged)))
    )

    print(f"acknowledged {len(acknowledged)}, gap {max(gaps_s):.1f} s, outages {len(outages)}")
    assert [one for one in acknowledged if one not in read] == []
    assert sum(read.values()) == len(read)
