"""Publishes to Apache RocketMQ by the adapter, and by the plainest fast programs, at equal durability.

    ./scripts/test --engines rocketmq      # once: fetches the servers' jars
    python -m benchmarks.broker_adapter.rocketmq_publish --json > rocketmq.json

All publish 512 bytes with one id to one topic of one queue on a broker that syncs before it answers (SYNC_FLUSH), in
batches of 500 and one at a time. `plain_grpc` calls the stubs of RocketMQ's own protocol and nothing else, through the
proxy, with a batch in one request; `plain_java` is RocketMQ's Java client, called by JPype, whose batches go to the
broker without a proxy. Rounds are rotated, figures are medians, in messages a second; the ratio is to the faster plain
program of each kind.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import jpype

from benchmarks.broker_adapter.publish_rounds import BODY, TOPIC, Publisher, arguments, compare, report
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from broker_adapter.rocketmq.protocol import service_pb2 as service
from broker_adapter.rocketmq.proxy_connection import ProxyServers, connect
from broker_adapter.rocketmq.signature import Credentials
from outbox_core.common.clock import SystemClock
from tests.broker_adapter.http.test_tls import certificate
from tests.engines import rocketmq as engine_tests
from tests.engines.jars import fetched_jars
from tests.engines.rocketmq.java_client import start_jvm
from tests.engines.rocketmq.rocketmq_cluster import HOST, PASSWORD, USER, RocketMqCluster

ANSWER_SECONDS_MAX = 60
NAME = TOPIC.replace(".", "_")


class PlainGrpc:
    """One request with all messages, on a channel that a proxy has greeted."""

    name = "plain_grpc"

    def __init__(self, cluster: RocketMqCluster, ids: Iterator[int]) -> None:
        clock = SystemClock()
        login = Credentials(USER, PASSWORD)
        servers = ProxyServers(
            hosts=[(HOST, cluster.proxy_port)], addresses=cluster.proxy, login=login, credentials=None
        )
        self._channel = connect(servers, clock=clock, deadline_ms=clock.monotonic_ms() + 1000 * ANSWER_SECONDS_MAX)
        self._send = self._channel.method("SendMessage", service.SendMessageResponse)
        self._ids = ids

    def publish(self, count: int) -> None:
        request = service.SendMessageRequest(messages=[self._message() for _ in range(count)])
        answer = self._send(request, timeout=ANSWER_SECONDS_MAX, metadata=self._channel.metadata())
        assert {one.status.code for one in answer.entries} == {definition.OK}

    def close(self) -> None:
        channel: grpc.Channel = self._channel.channel
        channel.close()

    def _message(self) -> definition.Message:
        name = f"p{next(self._ids)}"
        system = definition.SystemProperties(message_id=name, keys=[name], message_type=definition.NORMAL)
        return definition.Message(topic=definition.Resource(name=NAME), system_properties=system, body=BODY)


class PlainJava:
    """RocketMQ's Java producer: a batch is one call."""

    name = "plain_java"

    def __init__(self, cluster: RocketMqCluster, ids: Iterator[int]) -> None:
        java = jpype.JClass
        credentials = java("org.apache.rocketmq.acl.common.SessionCredentials")(USER, PASSWORD)
        hook = java("org.apache.rocketmq.acl.common.AclClientRPCHook")(credentials)
        self._producer = java("org.apache.rocketmq.client.producer.DefaultMQProducer")("plain", hook)
        self._producer.setNamesrvAddr(cluster.name_server)
        self._producer.setSendMsgTimeout(1000 * ANSWER_SECONDS_MAX)
        self._producer.start()
        self._message = java("org.apache.rocketmq.common.message.Message")
        self._list = java("java.util.ArrayList")
        self._body = jpype.JArray(jpype.JByte)(BODY)
        self._ids = ids

    def publish(self, count: int) -> None:
        batch: Any = self._list(count)
        for _ in range(count):
            batch.add(self._message(NAME, None, f"p{next(self._ids)}", self._body))
        assert str(self._producer.send(batch if count > 1 else batch.get(0)).getSendStatus()) == "SEND_OK"

    def close(self) -> None:
        self._producer.shutdown()


def plain(cluster: RocketMqCluster, ids: Iterator[int]) -> Sequence[Publisher]:
    """Through the proxy, and without it."""
    return [PlainGrpc(cluster, ids), PlainJava(cluster, ids)]


def run(chosen: argparse.Namespace) -> Mapping[str, Any]:
    """All rounds, on servers of their own."""
    jars = fetched_jars(Path(engine_tests.__path__[0]) / "pom.xml")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        start_jvm(jars=jars, home=folder / "client")
        cluster = RocketMqCluster(jars=jars, folder=folder, tls=certificate(folder, address=HOST))
        try:
            cluster.start()
            cluster.client.make_topic(NAME, kind="NORMAL", queues=1)
            return compare(cluster.url(), lambda ids: plain(cluster, ids), chosen)
        finally:
            cluster.stop()


def main() -> None:
    chosen = arguments(__doc__, batches=20, singles=200).parse_args()
    report("Apache RocketMQ", run(chosen), chosen)


if __name__ == "__main__":
    main()
