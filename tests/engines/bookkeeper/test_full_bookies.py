"""Bookies that fill up: publishes are refused before the bookies refuse everything; dispatch and cancel go on."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import requests

from broker_adapter.http import HttpBroker
from outbox_core.messages.message import CancelStatus
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish, refusal

CHECK_MS = "200"
"""How often nodes here ask bookies for their disks."""
ANYTHING = "0.00001"
"""A limit that is below what any disk has in use."""
FAR_MS = 86_400_000
SESSION_MS = "30000"
"""No slow machine outlives it: a node that lost its session would refuse publishes for another reason."""


def readiness(node: NodeProcess) -> tuple[int, str]:
    """The status and text of a node's probe."""
    answer = requests.get(f"{node.url}/readyz", timeout=60)
    return answer.status_code, answer.text


def wait_until_refused(node: NodeProcess, words: str) -> str:
    """Wait until a node's probe has these words; returns all that it said then."""
    said: list[str] = []

    def is_refused() -> bool:
        said.append(readiness(node)[1])
        return words in said[-1]

    eventually(is_refused, what=f"the node refuses publishes: {words}")
    return said[-1]


def names_no_room(status: Mapping[str, Any]) -> bool:
    """Whether there is one node, which recorded at its last beat that bookies have no room."""
    reasons = [node["refuses"] or "" for node in status["nodes"]]
    return len(reasons) == 1 and "bookies have room" in reasons[0]


def test_above_the_limit_publishes_are_refused_and_what_is_scheduled_is_sent_and_canceled(
    running: RunningCluster,
) -> None:
    node = running.node("n1")
    running.wait_until_served(node)
    due, far = messages(100, due_in_ms=6_000), messages(10, due_in_ms=FAR_MS, prefix="far")
    publish(node.url, [*due, *far])
    node.end(signal.SIGKILL)
    limited = running.node("limited", bookie_usage_max=ANYTHING, bookie_check_ms=CHECK_MS, session_ms=SESSION_MS)
    running.wait_until_served(limited)
    wait_until_refused(limited, "0 of 3 bookies have room")
    running.wait_until_shown(names_no_room, what="the cluster knows it")

    reason = refusal(limited.url)
    broker = HttpBroker(limited.url)
    canceled = broker.cancel([message.id for message in far])
    broker.close()
    came = running.consume({message.id for message in due})

    assert "0 of 3 bookies have room for new messages, and a ledger needs 2" in reason
    assert readiness(limited)[0] == 503
    assert canceled == [CancelStatus.CANCELED] * len(far)
    assert Counter(one for one, _ in came).keys() == {message.id for message in due}
    assert min(late_ms for _, late_ms in came) >= 0
    assert "refuses publishes: 0 of 3 bookies" in running.command("status").stdout
    assert "publishes_refused_for_space" in limited.log


def test_nothing_is_lost_while_bookies_are_read_only_and_publishes_go_on_afterwards(
    running: RunningCluster, cluster: BookKeeperCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    node = running.node("n1", bookie_check_ms=CHECK_MS)
    running.wait_until_served(node)
    first, second, _ = cluster.bookie_ids
    before, during, after = (messages(60, due_in_ms=2_000, prefix=name) for name in ("before", "during", "after"))
    publish(node.url, before)

    cluster.fill(first)
    publish(node.url, during)
    running.wait_until_shown(lambda it: it["bookies"]["read_only"] == [first], what="the first bookie is read-only")
    cluster.fill(second)
    why = wait_until_refused(node, "1 of 3 bookies have room")
    assert f"{first} is" in why
    assert "% full, read-only" in why
    assert refusal(node.url)
    running.wait_until_shown(lambda it: "no ledger can be made" in (it["bookies"]["warning"] or ""), what="a warning")
    cluster.restore()
    publish(node.url, after)
    came = running.consume({message.id for message in (*before, *during, *after)})

    assert len({one for one, _ in came}) == 180
    assert min(late_ms for _, late_ms in came) >= 0
