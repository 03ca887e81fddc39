"""A history of several processes over HTTP, with a broker that is killed again and again: nothing lost or invented.

What each client was answered is held against what the broker has in the end.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from messaging import Broker, connect
from messaging.errors import BrokerError
from messaging.message import GroupConfig, Message, PublishStatus
from tests.broker_adapter.servers import ServerProcess

TOPIC, GROUPS = "orders", ("billing", "audit")
KILLS = 4
PAUSE_S = 0.6


class History:
    """What clients asked and were answered, from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked: set[str] = set()
        self.stored: set[str] = set()
        self.delivered: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.acked: defaultdict[str, set[str]] = defaultdict(set)
        self.again_after_ack: list[str] = []

    def publishing(self, ids: list[str]) -> None:
        with self._lock:
            self.asked.update(ids)

    def published(self, ids: list[str]) -> None:
        with self._lock:
            self.stored.update(ids)

    def handed_out(self, group: str, ids: list[str]) -> None:
        with self._lock:
            self.again_after_ack += [one for one in ids if one in self.acked[group]]
            self.delivered[group].update(ids)

    def settled(self, group: str, ids: list[str]) -> None:
        with self._lock:
            self.acked[group].update(ids)


def produce(broker: Broker, history: History, name: str, stop: threading.Event) -> None:
    """Publish until told to stop; what was not answered is published again, under the same ids."""
    number = 0
    while not stop.is_set():
        ids = [f"{name}-{number}-{part}" for part in range(5)]
        history.publishing(ids)
        while not stop.is_set():
            try:
                results = broker.publish([Message(id=one, topic=TOPIC, body=one.encode() * 30) for one in ids])
            except BrokerError:
                stop.wait(0.01)
                continue
            assert {one.status for one in results} <= {PublishStatus.STORED, PublishStatus.DUPLICATE}
            history.published(ids)
            break
        number += 1


def consume(broker: Broker, history: History, group: str, stop: threading.Event, *, seed: int) -> None:
    """Pull and acknowledge most of it, until told to stop."""
    random = Random(seed)
    while not stop.is_set():
        try:
            found = broker.pull(TOPIC, group, max_messages=20, wait_ms=200, invisible_ms=500)
            history.handed_out(group, [one.id for one in found])
            assert all(one.body == one.id.encode() * 30 for one in found)
            mine = [one for one in found if random.random() < 0.9]
            statuses = broker.ack([one.receipt for one in mine])
            settled = [one.id for one, status in zip(mine, statuses, strict=True) if status == "acked"]
            history.settled(group, settled)
        except BrokerError:
            stop.wait(0.01)


@pytest.mark.slow
def test_a_broker_that_is_killed_under_many_clients_keeps_its_word(tmp_path: Path, random_seed: int) -> None:
    history, stop = History(), threading.Event()
    server = ServerProcess(tmp_path / "data")
    server.start()
    clients = [connect(server.url) for _ in range(6)]
    for group in GROUPS:
        clients[0].admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1_000))
    pause = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(produce, clients[number], history, f"p{number}", stop) for number in range(2)]
        work += [
            pool.submit(consume, clients[2 + number], history, GROUPS[number % 2], stop, seed=random_seed + number)
            for number in range(4)
        ]
        for _ in range(KILLS):
            pause.wait(PAUSE_S)
            server.kill()
            server.start()
        pause.wait(PAUSE_S)
        stop.set()
        for one in work:
            one.result(60)

    left: defaultdict[str, set[str]] = defaultdict(set)
    for group in GROUPS:
        deadline = 200
        while clients[0].admin.figures(TOPIC, group)["backlog"] + clients[0].admin.figures(TOPIC, group)["in_flight"]:
            found = clients[0].pull(TOPIC, group, max_messages=1_000, wait_ms=500)
            assert clients[0].ack([one.receipt for one in found]) == ["acked"] * len(found)
            left[group] |= {one.id for one in found}
            deadline -= 1
            assert deadline
    for client in clients:
        client.close()
    server.end(signal.SIGTERM)

    assert history.stored
    for group in GROUPS:
        came = set(history.delivered[group]) | left[group]
        assert history.stored - came == set(), "lost"
        assert came - history.asked == set(), "invented"
        assert left[group] & history.acked[group] == set(), "came back after it was acknowledged"
    assert history.again_after_ack == [], "came back after it was acknowledged"
