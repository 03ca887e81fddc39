"""The inspection of brokers by name servers: one that hangs hides no other, and stops no publish."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final

import pytest

from broker_adapter.rocketmq.durability_inspection import (
    BROKER_CONFIG,
    BROKER_RUNTIME_INFO,
    CLUSTER_INFO,
    BrokerSettings,
)
from broker_adapter.rocketmq.protocol import definition_pb2 as definition
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, PublishStatus
from tests.broker_adapter.rocketmq.scripted_proxy import scripted_proxy

HOST: Final = "127.0.0.1"
WELL_SET: Final = b"flushDiskType=SYNC_FLUSH\ncleanFileForciblyEnable=false\n"


class _Answers(socketserver.StreamRequestHandler):
    """One request in RocketMQ's remoting protocol, to a name server and to the broker that it names: itself."""

    def handle(self) -> None:
        length, head_length = struct.unpack(">ii", self.rfile.read(8))
        head = json.loads(self.rfile.read(length - 4)[:head_length])
        broker = {"brokerName": "b", "brokerAddrs": {"0": f"{HOST}:{self.server.server_address[1]}"}}
        bodies = {
            CLUSTER_INFO: json.dumps({"brokerAddrTable": {"b": broker}}).encode(),
            BROKER_CONFIG: WELL_SET,
            BROKER_RUNTIME_INFO: json.dumps({"table": {"brokerVersionDesc": "V5_5_0"}}).encode(),
        }
        answer, body = json.dumps({"code": 0}).encode(), bodies[head["code"]]
        self.wfile.write(struct.pack(">ii", 4 + len(answer) + len(body), len(answer)) + answer + body)


@pytest.fixture
def name_server() -> Iterator[tuple[str, int]]:
    """The address of a name server, and of a broker that is well set."""
    with socketserver.ThreadingTCPServer((HOST, 0), _Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield HOST, server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture
def hanging() -> Iterator[socket.socket]:
    """A name server that takes connections and never answers."""
    with socket.create_server((HOST, 0)) as silent:
        yield silent


@pytest.mark.slow
@pytest.mark.parametrize("start", [b"", struct.pack(">ii", 1_000_000, 100)], ids=["lengths", "content"])
def test_a_name_server_whose_answer_trickles_is_given_up_though_every_byte_comes_in_time(start: bytes) -> None:
    is_over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(start)
            while not is_over.wait(0.2):
                connection.sendall(b"\0")

    with socket.create_server((HOST, 0)) as listener:
        trickling = threading.Thread(target=trickle, args=(listener,))
        trickling.start()
        try:
            _, weaknesses = BrokerSettings([listener.getsockname()], login=None).inspect(timeout_s=1)
        finally:
            is_over.set()
            trickling.join()

    assert ["timed out" in weakness.problem for weakness in weaknesses] == [True]


@pytest.mark.slow
def test_brokers_are_read_from_the_next_name_server_where_the_first_one_hangs_which_is_asked_last_then(
    name_server: tuple[str, int], hanging: socket.socket
) -> None:
    settings = BrokerSettings([hanging.getsockname(), name_server], login=None)

    assert [settings.inspect(timeout_s=6) for _ in range(3)] == [("5.5.0", [])] * 3

    hanging.accept()[0].close()
    hanging.setblocking(False)
    with pytest.raises(BlockingIOError):
        hanging.accept()


@pytest.mark.slow
def test_a_name_server_that_hangs_stops_no_publish(hanging: socket.socket) -> None:
    name_server = f"{HOST}:{hanging.getsockname()[1]}"
    with (
        scripted_proxy(definition.NORMAL) as proxy,
        closing(connect(f"{proxy.url}?nameserver={name_server}")) as broker,
    ):
        [result] = broker.publish([Message(id="m0", topic="t", body=b"x")])

    assert result.status is PublishStatus.STORED
    assert proxy.sent == [["m0"]]
