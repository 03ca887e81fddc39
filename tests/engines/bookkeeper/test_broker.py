"""A broker that bookies keep: its owner, and bookies, die or pause under load, and another process goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
from sqlalchemy.orm import Session

from broker_adapter.http.admin_client import AdminClient
from outbox import Outbox
from outbox.migrate.schema_upgrade import upgrade
from outbox_core import Message, connect
from outbox_core.common.errors import BrokerError
from outbox_core.messages.message import GroupConfig
from tests.broker_adapter.servers import ServerProcess
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.client_load import GROUP, TOPIC, Known, Load, check_restored
from tests.outbox_broker.cluster.conftest import eventually

if TYPE_CHECKING:
    from tests.outbox_broker.cluster.broker_nodes import BrokerNodes


def test_an_owner_and_a_bookie_that_are_killed_under_load_lose_nothing_that_was_acknowledged(
    broker_nodes: BrokerNodes, cluster: BookKeeperCluster
) -> None:
    broker_nodes.start("n1")
    owner = broker_nodes.wait_for_owner()
    other = broker_nodes.start("n2")
    load = Load(broker_nodes.url, goes_on=True)

    with load.running():
        load.wait_for(5)
        cluster.kill9(cluster.bookie_ids[0])
        load.wait_for(Known(load).settled_each + 5)
        owner.end(signal.SIGKILL)
        assert broker_nodes.wait_for_owner(but=owner) is other
        load.wait_for(Known(load).settled_each + 5)
    check_restored(broker_nodes.url, load, Known(load))


def test_a_copy_that_is_taken_under_load_has_what_was_acknowledged_before_it(
    broker_nodes: BrokerNodes, node_settings: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node_settings.items():
        monkeypatch.setenv(f"OUTBOX_CLUSTER__{name.upper()}", value)
    node = broker_nodes.start("n1", session_ms="30000")
    broker_nodes.wait_for_owner()
    load, to = Load(broker_nodes.url, goes_on=True), tmp_path / "copy"

    with load.running():
        load.wait_for(5)
        known = Known(load)
        command = ["store", "copy", "--store", broker_nodes.store, "--url", node.url, "--to", str(to)]
        run(*command).check_returncode()
    copy = ServerProcess(to)
    try:
        copy.start()
        check_restored(copy.url, load, known)
    finally:
        copy.kill()


def test_a_folder_goes_onto_bookies_by_its_backup_with_its_dead_letters_and_there_has_cordons(
    broker_nodes: BrokerNodes, node_settings: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node_settings.items():
        monkeypatch.setenv(f"OUTBOX_CLUSTER__{name.upper()}", value)
    folder, backup = ServerProcess(tmp_path / "data"), str(tmp_path / "backup")
    folder.start()
    load = Load(folder.url)
    try:
        held = give_up(folder.url, "dead", "held")
        with load.running():
            load.wait_for(20)
            known = Known(load)
            run("backup", str(folder.folder), "--to", backup, "--url", folder.url, "--rate", "max").check_returncode()
    finally:
        folder.kill()

    run("restore", backup, "--store", broker_nodes.store).check_returncode()
    again = run("restore", backup, "--store", broker_nodes.store)
    owner = broker_nodes.start("n1", session_ms="30000")
    broker_nodes.wait_for_owner()
    broker, client = connect(owner.url), AdminClient(owner.url)
    statuses = broker.ack([held])
    broker.close()

    assert again.returncode == 2
    assert "there is a broker at this path already" in again.stderr
    assert statuses == ["stale"]
    assert [letter.id for letter in client.dead(BROKEN, GROUP)[0]] == ["dead"]
    check_restored(owner.url, load, known)

    client.cordon(reason="moving")
    other = broker_nodes.start("n2", session_ms="30000")
    owner.end(signal.SIGTERM)
    assert broker_nodes.wait_for_owner() is other
    refused = requests.post(f"{other.url}/v1/publish", json=ONE_MESSAGE, timeout=120)
    AdminClient(other.url).uncordon()
    taken = requests.post(f"{other.url}/v1/publish", json=ONE_MESSAGE, timeout=120)
    assert (refused.status_code, taken.status_code) == (503, 200)
    assert "moving" in refused.text


@pytest.mark.slow
def test_a_reconciliation_reads_the_bookies_beside_the_owner_and_finds_every_message(
    broker_nodes: BrokerNodes, node_settings: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in node_settings.items():
        monkeypatch.setenv(f"OUTBOX_CLUSTER__{name.upper()}", value)
    broker_nodes.start("n1", session_ms="30000")
    broker_nodes.wait_for_owner()
    url = f"sqlite:///{tmp_path / 'business.db'}"
    upgrade(url, schema="outbox")
    box, consumer = Outbox(url, broker=broker_nodes.url), connect(broker_nodes.url)
    AdminClient(broker_nodes.url).declare_group(TOPIC, GROUP, GroupConfig())
    with Session(box.engine) as session, session.begin():
        for number in range(40):
            box.publish(TOPIC, {"n": number}, session=session)
        far = [box.publish(TOPIC, {}, delay=timedelta(days=2), session=session) for _ in range(10)]
    eventually(lambda: _archived(box) == 50, what="all is sent")
    with Session(box.engine) as session, session.begin():
        for message in far[:5]:
            box.cancel(message.id, session=session)
    eventually(lambda: _archived(box) == 55, what="the cancels are sent")
    handled = 0
    while handled < 40:
        deliveries = consumer.pull(TOPIC, GROUP, max_messages=10, wait_ms=20_000)
        handled += consumer.ack([delivery.receipt for delivery in deliveries]).count("acked")
    consumer.close()
    box.close()

    first, again = (reconciled(tmp_path, url=url, store=broker_nodes.store) for _ in range(2))

    for summary in (first, again):
        assert [summary[name] for name in ("lost", "phantom", "early", "mismatch", "unexplained")] == [0] * 5, summary
        rules = Counter[str]()
        for counted in summary["verdict_counts"]:
            if counted["scope"] == "message":
                rules[counted["rule"]] += counted["count"]
        assert rules == {"stored": 45, "canceled": 5, "cancel_accepted": 5}, summary


def _archived(box: Outbox) -> int:
    with box.engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT COUNT(*) FROM outbox_archive").scalar_one())


def reconciled(folder: Path, *, url: str, store: str) -> dict[str, Any]:
    """Reconcile in a process of its own; returns the summary."""
    config = folder / "reconcile.toml"
    config.write_text(
        f'[database]\nurl = "{url}"\n[broker]\nstore = "{store}"\n'
        f'[output]\nfolder = "{folder / "proof"}"\n[grace]\nseconds = 1\nconfirm_after_seconds = 0\n'
    )
    command = [sys.executable, "-m", "outbox", "reconcile", "run", "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode in {0, 1}, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


BROKEN = "broken"
ONE_MESSAGE = {"messages": [{"id": "a", "topic": TOPIC, "body": "x"}]}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `outbox broker ...` as a process of its own, since it may start a JVM."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "broker", *command], capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout, done.stderr)  # shown with a failure
    return done


def give_up(url: str, dead: str, held: str) -> str:
    """Make a dead letter of one message, and hold another one; returns its receipt."""
    AdminClient(url).declare_group(BROKEN, GROUP, GroupConfig(max_attempts=1))
    broker = connect(url)
    broker.publish([Message(id=one, topic=BROKEN, body=b"x") for one in (dead, held)])
    [first, second] = broker.pull(BROKEN, GROUP, max_messages=2, invisible_ms=3_600_000)
    broker.nack([first.receipt], reason="broken")
    broker.close()
    return second.receipt


def test_an_owner_that_is_paused_under_load_and_wakes_up_acknowledges_and_delivers_nothing(
    broker_nodes: BrokerNodes,
) -> None:
    owner = broker_nodes.start("n1")
    broker_nodes.wait_for_owner()
    other = broker_nodes.start("n2")
    load = Load(broker_nodes.url, goes_on=True)

    with load.running():
        load.wait_for(5)
        owner.pause()
        assert broker_nodes.wait_for_owner(but=owner) is other
        load.wait_for(Known(load).settled_each + 5)
        owner.resume()
        broker = connect(owner.url)
        with pytest.raises(BrokerError):
            broker.pull(TOPIC, GROUP)
        broker.close()
        eventually(lambda: f"node n2 at {other.url} serves the broker" in ready(owner.url), what="it knows its place")
        load.wait_for(Known(load).settled_each + 5)
    check_restored(broker_nodes.url, load, Known(load))


def ready(url: str) -> str:
    """What a node says of its readiness."""
    return requests.get(f"{url}/readyz", timeout=60).text


def test_without_bookies_publishes_are_refused_and_it_goes_on_by_itself_when_they_are_back(
    broker_nodes: BrokerNodes, cluster: BookKeeperCluster
) -> None:
    node = broker_nodes.start("n1")
    broker_nodes.wait_for_owner()
    load = Load(broker_nodes.url, goes_on=True)

    with load.running():
        load.wait_for(3)
        for bookie in cluster.bookie_ids:
            cluster.kill9(bookie)
        eventually(lambda: "failed" in ready(node.url), what="it is not ready")
        refused = requests.post(
            f"{node.url}/v1/publish", json={"messages": [{"id": "a", "topic": TOPIC, "body": "x"}]}, timeout=120
        )
        known = Known(load).settled_each
        cluster.restore()
        load.wait_for(known + 5)
    check_restored(broker_nodes.url, load, Known(load))

    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
