"""Bookies that fill up: publishes are refused before the bookies refuse everything; dispatch and cancel go on. Clients
read from them meanwhile, and write to them once they have room.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from broker_adapter.http import HttpBroker
from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions, JavaLedgers
from outbox_broker.cluster.bookkeeper.java_runtime import JavaRuntime
from outbox_broker.segments.ledgers import LedgerFailed
from outbox_core.messages.message import CancelStatus
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.bookkeeper.ledger_creation import wait_until_ledgers_can_be_made
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish, refusal
from tests.outbox_broker.mounts import filled, small_disk

CHECK_MS = "200"
"""How often nodes here ask bookies for their disks."""
ANYTHING = "0.00001"
"""A limit that is below what any disk has in use."""
FAR_MS = 86_400_000
DISK_MB = 256
USED_SHARE = 0.97
"""Above the share at which the bookie of a small disk becomes read-only."""
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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that a test can fill."""
    with small_disk(tmp_path, size_mb=DISK_MB) as place:
        yield place


@pytest.fixture
def small_bookie(jars: Path, disk: Path, tmp_path: Path) -> Iterator[BookKeeperCluster]:
    """A cluster of one bookie, whose entries are on that file system."""

    def settings(_number: int, _host: str) -> Mapping[str, object]:
        limits = {"diskUsageThreshold": 0.9, "diskUsageWarnThreshold": 0.8, "diskCheckInterval": 200}
        return {"ledgerDirectories": disk / "ledgers", **limits}

    servers = BookKeeperCluster(jars=jars, folder=tmp_path, bookies=1, bookie_settings=settings)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def opened(small_bookie: BookKeeperCluster, runtime: JavaRuntime) -> Iterator[Callable[[], JavaLedgers]]:
    """Make a client, which has no connection to the bookie before it uses it."""
    options = BookKeeperOptions(
        ensemble=1, write_quorum=1, ack_quorum=1, request_s_max=60, operation_ms_max=120_000, session_ms=30_000
    )
    with ExitStack() as stack:

        def open_client() -> JavaLedgers:
            ledgers = JavaLedgers(runtime, small_bookie.metadata_uri, options=options)
            stack.callback(ledgers.close)
            return ledgers

        yield open_client


def written(ledgers: JavaLedgers) -> int:
    """A closed ledger of one entry."""
    writer = ledgers.begin_create({})()
    writer.append(b"entry")
    writer.confirm(1)
    writer.begin_close()()
    return writer.ledger_id


def reads(ledgers: JavaLedgers, ledger_id: int) -> bool:
    """Whether a client reads that entry. It may be about to learn what became of the bookie."""
    try:
        return ledgers.read(ledger_id, 0, 0) == [b"entry"]
    except LedgerFailed:
        return False


def test_clients_connect_to_a_bookie_that_became_read_only_or_writable_while_they_ran(
    small_bookie: BookKeeperCluster, disk: Path, opened: Callable[[], JavaLedgers]
) -> None:
    [bookie] = small_bookie.bookie_ids
    ledger_id = written(opened())
    reader = opened()

    with filled(disk, share=USED_SHARE):
        eventually(lambda: small_bookie.is_read_only(bookie), what="the bookie is read-only")
        eventually(lambda: reads(reader, ledger_id), what="what it has is read")
        writer = opened()
    eventually(lambda: small_bookie.is_writable(bookie), what="the bookie is writable")
    wait_until_ledgers_can_be_made(writer)

    assert reads(writer, written(writer))
