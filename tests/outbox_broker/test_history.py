"""A history of several processes over HTTP, with a broker that is killed again and again: nothing lost, invented, early
or out of order.

What each process asked and was answered is held against each other and against what the broker has in the end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from outbox_core import Broker, connect
from outbox_core.messages.message import GroupConfig
from tests.broker_adapter.servers import ServerProcess
from tests.fixtures.fork_server import fork_server

ROOT = Path(__file__).parents[2]
TOPIC, ORDERED, GROUPS = "orders", "ledger", ("billing", "ledger")
PRODUCERS, CONSUMERS_EACH = 2, 2
KILLS = 4
DRAIN_PULLS_MAX = 2_000
LINES_BETWEEN_KILLS = (5, 150)
SHOWN_MIN = 100
DEADLINE_S = 120.0


@dataclass
class History:
    """What all clients told, in the order of the machine's clock."""

    asked: dict[str, str | None] = field(default_factory=dict)  # id -> key
    due_ms: dict[str, int] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    came: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    firsts: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    ack_asked: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    acked_ns: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """By group: id -> when its acknowledgement was answered."""
    early: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    came_after_ack: list[str] = field(default_factory=list)

    def read(self, lines: list[dict[str, Any]]) -> None:
        for line in sorted(lines, key=lambda one: int(one["at_ns"])):
            match line:
                case {"asked": "publish", "messages": messages}:
                    for message_id, key, due_ms in messages:
                        self.asked[message_id] = key
                        if due_ms:
                            self.due_ms[message_id] = due_ms
                case {"answered": "publish", "ids": ids}:
                    self.stored += ids
                case {"answered": "pull", "group": group, "messages": messages}:
                    self.early += line["early"]
                    self.wrong += line["wrong"]
                    for message_id, _ in messages:
                        self.handed_out(group, message_id, asked_ns=line["asked_ns"])
                case {"asked": "ack", "group": group, "ids": ids}:
                    self.ack_asked[group].update(ids)
                case {"answered": "ack", "group": group, "ids": ids}:
                    self.acked_ns[group] = dict.fromkeys(ids, line["at_ns"]) | self.acked_ns[group]

    def handed_out(self, group: str, message_id: str, *, asked_ns: int) -> None:
        """Note what a pull brought. It was asked for at this time, and may have been handed out at once: its consumer
        may tell so late, when another one has had the message in the meantime, and has acknowledged it.
        """
        if asked_ns > self.acked_ns[group].get(message_id, asked_ns):
            self.came_after_ack.append(message_id)
        if not self.came[group][message_id]:
            self.firsts[group].append(message_id)
        self.came[group][message_id] += 1

    def out_of_order(self, group: str) -> list[tuple[str, str]]:
        """Pairs of a key's messages that an ordered group was handed in the wrong order: the later before the earlier
        one had been acknowledged, as far as anybody knew.

        Of messages for now, the earlier one is the one that its producer named first.
        """
        place = {message_id: number for number, message_id in enumerate(self.asked)}
        last: dict[str, str] = {}
        found = []
        for message_id in self.firsts[group]:
            key = self.asked.get(message_id)
            if key is None or message_id in self.due_ms:
                continue
            before = last.get(key)
            if before is not None and place[before] > place[message_id]:
                found.append((before, message_id))
            last[key] = message_id
        return found


class Lines:
    """What the client processes have told so far, and a wait for more of it."""

    def __init__(self) -> None:
        self._more = threading.Condition()
        self._of_client: dict[str, list[bytes]] = {}

    def read(self, name: str, out: Iterable[bytes]) -> None:
        """Take what a client tells, until it ends."""
        with self._more:
            lines = self._of_client[name] = []
        for line in out:
            with self._more:
                lines.append(line)
                self._more.notify_all()

    def wait_for_more(self, *, clients: int, count: int = 0) -> None:
        """Wait until each of so many clients has told something from now on, and all together so many lines."""
        with self._more:
            before = {name: len(lines) for name, lines in self._of_client.items()}

            def have_told() -> bool:
                told = [len(lines) - before.get(name, 0) for name, lines in self._of_client.items()]
                return sum(one > 0 for one in told) == clients and sum(told) >= count

            assert self._more.wait_for(have_told, DEADLINE_S), "a client tells no more"

    def wait_for(self, begin: bytes, *, count: int) -> None:
        """Wait until so many lines that begin so were told, by any client."""

        def have_told() -> bool:
            return sum(line.startswith(begin) for lines in self._of_client.values() for line in lines) >= count

        with self._more:
            assert self._more.wait_for(have_told, DEADLINE_S), f"too few tell {begin!r}"

    def all(self) -> list[dict[str, Any]]:
        """Everything told, by any client."""
        return [json.loads(line) for lines in self._of_client.values() for line in lines]


@contextmanager
def client(lines: Lines, what: str, url: str, name: str, seed: int, *group: str) -> Iterator[None]:
    """A client process; all that it told is in `lines` once the block has ended."""
    process = fork_server().start(
        "tests.outbox_broker.history_client", what, url, name, str(seed), TOPIC, *group,
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    reader = threading.Thread(target=lines.read, args=(name, process.stdout))
    reader.start()
    try:
        yield
    finally:
        process.stdin.close()
        code = process.wait(DEADLINE_S)
        reader.join(DEADLINE_S)
        process.close()
    assert code == 0, f"{name} ended with {code}"


def run_clients(server: ServerProcess, *, random: Random) -> list[dict[str, Any]]:
    """All clients, while the broker is killed at moments that the seed chooses; returns what they told."""
    lines = Lines()
    clients = [("produce", f"p{number}", ()) for number in range(PRODUCERS)]
    clients += [("consume", f"{group}{number}", (group,)) for group in GROUPS for number in range(CONSUMERS_EACH)]

    with ExitStack() as stack:
        for what, name, group in clients:
            stack.enter_context(client(lines, what, server.url, name, random.randrange(10**9), *group))
        lines.wait_for_more(clients=len(clients))
        for _ in range(KILLS):
            lines.wait_for_more(clients=len(clients), count=random.randint(*LINES_BETWEEN_KILLS))
            server.kill()
            server.start()
        lines.wait_for_more(clients=len(clients))
        lines.wait_for(b'{"answered": "publish"', count=SHOWN_MIN)
        for group in GROUPS:
            lines.wait_for(b'{"answered": "ack", "group": "%b", "ids": ["' % group.encode(), count=1)
    return lines.all()


def drain(broker: Broker, group: str, history: History) -> None:
    """Take and settle all that is left."""
    for _ in range(DRAIN_PULLS_MAX):
        figures = broker.admin.figures(TOPIC, group)
        if not figures["backlog"] + figures["in_flight"] + figures["scheduled"]:
            return
        asked_ns = time.monotonic_ns()
        found = broker.pull(TOPIC, group, max_messages=1_000, wait_ms=500)
        for one in found:
            history.handed_out(group, one.id, asked_ns=asked_ns)
        assert broker.ack([one.receipt for one in found]) == ["acked"] * len(found)
    raise AssertionError(f"{group} is never done: {broker.admin.figures(TOPIC, group)}")


@pytest.mark.slow
def test_a_broker_that_is_killed_under_many_processes_keeps_its_word(tmp_path: Path, random_seed: int) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    broker = connect(server.url)
    for group in GROUPS:
        broker.admin.declare_group(TOPIC, group, GroupConfig(max_attempts=1_000, ordered=group == ORDERED))

    lines = run_clients(server, random=Random(random_seed))
    history = History()
    history.read(lines)
    for group in GROUPS:
        drain(broker, group, history)
    broker.close()
    server.end(signal.SIGTERM)

    assert len(history.stored) >= SHOWN_MIN, "the history shows nothing"
    assert len(set(history.asked.values())) > PRODUCERS
    for group in GROUPS:
        came = set(history.came[group])
        assert set(history.stored) - came == set(), "lost"
        assert came - set(history.asked) == set(), "invented"
        assert history.acked_ns[group], "the history shows nothing"
    assert history.came_after_ack == [], "came back after it was acknowledged"
    assert history.early == []
    assert history.wrong == [], "another message's body"
    assert history.out_of_order(ORDERED) == []
