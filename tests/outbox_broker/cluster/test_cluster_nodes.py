"""Nodes as processes in front of a real broker: killed, paused, drained and restarted; nothing lost, nothing early."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from broker_adapter.http import HttpBroker
from outbox_core.runtime.command import main
from outbox_core.runtime.stop_signals import EXIT_BY_SIGNAL
from tests.fixtures.zookeeper_server import ZooKeeper
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.node_process import NodeProcess
from tests.outbox_broker.cluster.running_cluster import SHARDS, RunningCluster, messages, publish, refusal

pytestmark = [pytest.mark.processes, pytest.mark.slow]
HOUR_MS = 3_600_000
LONG_SESSION_MS = "30000"
"""Of nodes that nobody kills: a pause costs them no shard."""


@pytest.fixture
def running(running_zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster without nodes."""
    with ExitStack() as stack:
        yield RunningCluster(running_zookeeper.hosts, tmp_path, stack)


def test_any_node_takes_any_request_and_every_message_comes_once_at_its_time(running: RunningCluster) -> None:
    first, second = (running.node(name, session_ms=LONG_SESSION_MS) for name in ("n1", "n2"))
    running.wait_until_served(first, second)
    far = messages(100, due_in_ms=HOUR_MS, prefix="far-")
    publish(first.url, far)
    broker = HttpBroker(second.url)

    again = broker.publish(far[:50])
    canceled = broker.cancel([message.id for message in far[50:]])
    counts = requests.get(f"{first.url}/v1/scheduled?bucket=day&topic=t", timeout=60).json()["counts"]
    one = requests.get(f"{first.url}/v1/scheduled/{far[0].id}", timeout=60).json()
    batch = messages(200)
    publish(first.url, batch)
    publish(second.url, batch[:50])
    soon = [message.id for message in batch[150:]]  # which may be due by now
    gone = {one for one, status in zip(soon, broker.cancel(soon), strict=True) if status == "canceled"}
    wanted = {message.id for message in batch} - gone
    came = running.consume(wanted)
    broker.close()

    assert {result.status for result in again} == {"duplicate"}
    assert set(canceled) == {"canceled"}
    assert sum(count["messages"] for count in counts) == 50
    assert one["deliver_at_ms"] == far[0].deliver_at_ms
    assert sorted(one for one, _ in came) == sorted(wanted)
    assert min(late_ms for _, late_ms in came) >= 0


def test_what_the_target_refuses_for_good_is_listed_and_retried_at_any_node(
    running: RunningCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, target = running.recorded_target()
    first, second = (running.node(name, target=target, session_ms=LONG_SESSION_MS) for name in ("n1", "n2"))
    running.wait_until_served(first, second)
    batch = messages(60, due_in_ms=10)
    poisons = {message.id for message in batch[::3]}
    recorded.rejects = set(poisons)
    publish(first.url, batch)

    def refused(url: str) -> set[str]:
        assert command("refused", "--url", url) == 0
        return {line.split("\t")[1] for line in capsys.readouterr().out.splitlines() if "never" in line}

    eventually(lambda: refused(first.url) == poisons, what="every message that was refused in the list")
    assert refused(second.url) == poisons
    running.consume({message.id for message in batch} - poisons)
    *rest, discarded = sorted(poisons)
    assert command("retry", *rest[:2], "--url", second.url) == 1
    recorded.rejects.clear()
    assert command("retry", *rest, "--url", second.url) == 0
    came = running.consume(set(rest))
    assert command("cancel", discarded, "--yes", "--url", first.url) == 0

    assert sorted(one for one, _ in came) == rest
    assert capsys.readouterr().out.splitlines()[-1] == f"{discarded}\tcanceled"
    assert refused(first.url) == refused(second.url) == set()


def command(*arguments: str) -> int:
    """The exit status of `outbox broker schedule`."""
    with pytest.raises(SystemExit) as ended:
        main(["broker", "schedule", *arguments])
    return int(ended.value.code or 0)


def test_a_node_that_is_killed_loses_nothing(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(300)
    publish(second.url, batch[:150])

    first.end(signal.SIGKILL)
    publish(second.url, batch[150:])
    came = running.consume({message.id for message in batch})

    running.wait_until_served(second)
    assert len({one for one, _ in came}) == len(came) == 300


def test_a_paused_owner_that_wakes_up_neither_accepts_nor_sends_for_its_former_shards(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    batch = messages(200, due_in_ms=8_000)
    publish(second.url, batch)

    first.pause()
    running.wait_until_alive("n2")
    running.remove_locks()
    running.wait_until_served(second)
    came = running.consume({message.id for message in batch})
    first.resume()
    running.wait_until_served(first, second)
    more = messages(100, prefix="later")
    publish(first.url, more)
    came += running.consume({message.id for message in more})

    assert len({one for one, _ in came}) == len(came) == 300
    assert min(late_ms for _, late_ms in came) >= 0


def test_a_node_that_is_paused_while_it_sends_sends_what_it_had_handed_over_and_settles_nothing(
    running: RunningCluster,
) -> None:
    handed = running.pause_while_sending()

    assert 0 < len(handed) < 400


def test_a_rolling_restart_under_load_loses_nothing_and_waits_for_nobody_for_long(running: RunningCluster) -> None:
    nodes = running.node("n1"), running.node("n2"), running.node("n3")
    running.wait_until_served(*nodes)
    published: set[str] = set()
    is_over = threading.Event()

    def load() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            batch = messages(20, prefix=f"b{number}-")
            publish(nodes[number % 3].url, batch)
            published.update(message.id for message in batch)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        for node in nodes:
            assert node.end(signal.SIGTERM) == 0
            assert "Traceback" not in node.log
            node.start()
            running.wait_until_served(*nodes)
    finally:
        is_over.set()
        loader.join()
    came = running.consume(published)

    assert len({one for one, _ in came}) == len(came) == len(published)


def test_a_second_signal_ends_a_node_that_hands_its_shards_over_and_nothing_is_lost(running: RunningCluster) -> None:
    held, url = running.recorded_target()
    node = running.node("n1", target=url)
    running.wait_until_served(node)
    held.hold()
    batch = messages(200, due_in_ms=0)
    publish(node.url, batch)
    eventually(lambda: held.held > 0, what="a message on its way, not answered")

    node.send(signal.SIGTERM)
    eventually(lambda: "shard_closing" in node.log, what="that it closes its shards, and waits for the answer")
    code = node.end(signal.SIGTERM)
    held.release()
    successor = running.node("n2")
    running.wait_until_served(successor)
    came = running.consume({message.id for message in batch})

    assert code == EXIT_BY_SIGNAL + signal.SIGTERM
    assert {one for one, _ in came} == {message.id for message in batch}


def test_a_node_that_is_drained_gives_its_shards_away_until_the_drain_is_undone(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)

    assert running.command("drain", "--node", "n1").exit_code == 0
    running.wait_until_served(second)
    assert {one["name"]: one["unable"] for one in running.status()["nodes"]} == {"n1": "it is draining", "n2": None}
    publish(first.url, messages(10, prefix="through-the-drained-node"))
    assert running.command("drain", "--node", "n1", "--undo").exit_code == 0

    running.wait_until_served(first, second)


def test_the_counters_of_a_node_do_not_go_back_when_its_shards_leave_it(running: RunningCluster) -> None:
    first, second = running.node("n1"), running.node("n2")
    running.wait_until_served(first, second)
    publish(first.url, messages(100, due_in_ms=HOUR_MS))
    before = [received(first), received(second)]

    assert running.command("drain", "--node", "n1").exit_code == 0
    running.wait_until_served(second)

    assert sum(before) == 100
    assert [received(first), received(second)] == before


def received(node: NodeProcess) -> float:
    """How many messages a node has stored since its start; asked again while a shard is being opened."""
    answers: list[requests.Response] = []

    def is_answered() -> bool:
        answers.append(requests.get(f"{node.url}/metrics", timeout=60))
        assert answers[-1].status_code in {200, 503}, answers[-1].text
        return answers[-1].ok

    eventually(is_answered, what="the node's metrics")
    lines = answers[-1].text.splitlines()
    return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith("broker_messages_received_total{"))


def test_what_was_canceled_before_a_generation_was_added_stays_so_though_it_is_published_again(
    running: RunningCluster,
) -> None:
    nodes = running.node("n1"), running.node("n2")
    running.wait_until_served(*nodes)
    kept, withdrawn, early = (messages(20, due_in_ms=3_600_000, prefix=one) for one in ("kept", "withdrawn", "early"))
    publish(nodes[0].url, [*kept, *withdrawn])
    broker = HttpBroker(nodes[1].url)
    assert set(broker.cancel([message.id for message in withdrawn])) == {"canceled"}
    assert set(broker.cancel([message.id for message in early])) == {"unknown"}

    assert running.command("init", "--add-generation", "--shards", str(SHARDS)).exit_code == 0
    running.wait_until_shown(
        lambda status: [one["state"] for one in status["shards"].values()] == ["serving"] * 2 * SHARDS,
        what="the shards of both generations served",
    )
    publish(nodes[1].url, [*kept, *withdrawn, *early])
    broker.close()

    counts = requests.get(f"{nodes[1].url}/v1/scheduled?bucket=day&topic=t", timeout=60).json()["counts"]
    assert sum(count["messages"] for count in counts) == len(kept)


def test_nodes_with_different_tokens_refuse_each_other_and_say_so(running: RunningCluster) -> None:
    tokens = [running.folder / "one", running.folder / "two"]
    for number, token in enumerate(tokens):
        token.write_text(f"token of node {number}")
    first, second = (
        running.node(name, peer_token_file=str(token), session_ms=LONG_SESSION_MS)
        for name, token in zip(("n1", "n2"), tokens, strict=True)
    )
    running.wait_until_served(first, second)

    eventually(lambda: "peer_token_file" in refusal(first.url), what="the refusal of the token")


def test_a_cluster_without_nodes_shows_why_its_shards_wait(running: RunningCluster) -> None:
    shown = running.command("status")

    assert shown.exit_code == 1
    assert "shard 0-0000 waits: no node is alive" in shown.stdout


def test_a_node_without_a_cluster_ends_with_the_cure(running: RunningCluster) -> None:
    settings = {"shared_folder": str(running.folder)}
    node = NodeProcess(
        "n1", store=running.store + "/other", target=running.target, folder=running.folder, settings=settings
    )

    with pytest.raises(AssertionError, match="outbox delay init"):
        node.start()


def test_a_node_refuses_what_it_cannot_forward(running: RunningCluster) -> None:
    only = running.node("n1", capacity="4")
    running.wait_until_shown(lambda status: len(status["shards"]) == 4, what="four shards served")

    eventually(lambda: "no node has room" in refusal(only.url), what="the refusal for lack of room")
