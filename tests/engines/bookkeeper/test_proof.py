"""The reconciliation reads a cluster's ledgers beside their owners: its records are the truth, and nobody is fenced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from broker_adapter.http import HttpBroker
from outbox import Outbox
from outbox.migrate.schema_upgrade import upgrade
from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal import journal
from spark_reconcile.core.settings import LedgerSource
from spark_reconcile.load.delay_records import export_delay
from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.outbox_broker.action_log import actions_of
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_broker.cluster.running_cluster import RunningCluster, messages, publish
from tests.outbox_broker.message_log import messages_of

EXPORT_SECONDS_MAX = 300
RUN_SECONDS_MAX = 550
FAR_MS = 24 * 3_600_000
SESSION_MS = "30000"
"""No slow machine outlives it: a node that lost its session would take its shards over anew."""


@pytest.fixture
def source(running: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> LedgerSource:
    """The cluster as the reconciliation's settings name it."""
    for name, value in {**running.environment, "OUTBOX_CLUSTER__SESSION_MS": SESSION_MS}.items():
        monkeypatch.setenv(name, value)
    return LedgerSource(store=running.store)


@contextmanager
def published_meanwhile(url: str) -> Iterator[list[str]]:
    """Publishes one batch after another; yields the ids of those that were answered."""
    stopping, stored = threading.Event(), []

    def go_on() -> None:
        number = 0
        while not stopping.is_set():
            batch = messages(20, due_in_ms=FAR_MS, prefix=f"meanwhile-{number}-")
            publish(url, batch)
            stored.extend(message.id for message in batch)
            number += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield stored
    finally:
        stopping.set()
        thread.join()


def cancels(folder: Path) -> set[str]:
    return {id_ for action in actions_of(folder) if isinstance(action, journal.Canceled) for id_ in action.ids}


def epochs(running: RunningCluster) -> dict[str, int]:
    return {shard: one["epoch"] for shard, one in running.status()["shards"].items()}


def test_an_export_has_what_waits_and_what_was_canceled_while_the_owner_writes_on(
    running: RunningCluster, source: LedgerSource, tmp_path: Path
) -> None:
    node = running.node("n1", session_ms=SESSION_MS)
    running.wait_until_served(node)
    soon, far = messages(100, due_in_ms=1_000, prefix="soon-"), messages(3_000, due_in_ms=FAR_MS, prefix="far-")
    publish(node.url, [*soon, *far])
    broker = HttpBroker(node.url)
    stopped = [message.id for message in far[:40]]
    assert set(broker.cancel(stopped)) == {"canceled"}
    broker.close()
    running.consume({message.id for message in soon})
    before = epochs(running)

    with published_meanwhile(node.url) as stored:
        eventually(lambda: len(stored) >= 40, what="the owner writes")
        eventually(lambda: _has_all(source, tmp_path, stored[:40]), what="an export with what was stored before it")
        first = len(stored)
        eventually(lambda: len(stored) >= first + 40, what="the owner writes on")
    [*_, folder] = sorted(tmp_path.glob("export-*"), key=lambda one: one.stat().st_mtime_ns)

    found = {one.record.id: one.record for one in messages_of(folder)}
    dues = {message.id: message.deliver_at_ms for message in far[40:]}
    assert {name: one.deliver_at_ms for name, one in found.items() if name.startswith("far-")} == dues
    assert not found.keys() & {message.id for message in soon}, "they were delivered"
    assert found.keys() - dues.keys() <= set(stored)
    assert cancels(folder) == set(stopped)
    assert epochs(running) == before, "no shard was taken over"


def _has_all(source: LedgerSource, tmp_path: Path, ids: list[str]) -> bool:
    """What was confirmed half a second before the export is in it."""
    folder = tmp_path / f"export-{time.monotonic_ns()}"
    export = export_delay(source, folder, seconds_max=EXPORT_SECONDS_MAX)
    found = [one.record.id for one in messages_of(folder)]
    assert len(found) == len(set(found)) == export.messages
    return set(ids) <= set(found)


def test_a_reconciliation_knows_what_waits_in_the_cluster_what_was_canceled_and_what_was_delivered_when_due(
    running: RunningCluster, source: LedgerSource, tmp_path: Path
) -> None:
    node = running.node("n1", session_ms=SESSION_MS)
    running.wait_until_served(node)
    url = f"sqlite:///{tmp_path / 'business.db'}"
    upgrade(url, schema="outbox")
    box = Outbox(url, broker=node.url)
    now = datetime.now(UTC)
    with Session(box.engine) as session, session.begin():
        for number in range(30):
            box.publish("trips", {"n": number}, session=session)
            box.publish("trips", {"n": number}, deliver_at=now + timedelta(seconds=3), session=session)
        later = now + timedelta(days=2)
        far = [box.publish("trips", {"n": number}, deliver_at=later, session=session) for number in range(30)]
    eventually(lambda: _archived(box) == 90, what="all is sent")
    with Session(box.engine) as session, session.begin():
        for message in far[:10]:
            box.cancel(message.id, session=session)
    eventually(lambda: _archived(box) == 100, what="the cancels are sent")
    eventually(lambda: _stored(running) == 60, what="what is due is in the broker")
    box.close()

    with published_meanwhile(node.url) as stored:
        eventually(lambda: len(stored) >= 40, what="the owner writes")
        summary = reconcile(tmp_path, url=url, source=source, broker_data=running.folder / "broker")

    assert [summary[name] for name in ("lost", "phantom", "early", "mismatch", "unexplained")] == [0] * 5, summary
    rules = Counter[str]()
    for one in summary["verdict_counts"]:
        if one["scope"] == "message":
            rules[one["rule"]] += one["count"]
    assert {name: rules[name] for name in ("stored", "canceled", "cancel_accepted")} == {
        "stored": 80, "canceled": 10, "cancel_accepted": 10,
    }  # fmt: skip
    # What is published meanwhile is of a topic of its own, or newer than the grace time, as the run's clock decides.
    meanwhile = ("foreign_topic", "unrecorded_in_grace")
    assert sum(rules[name] for name in meanwhile) >= 40
    assert rules.keys() - set(meanwhile) == {"stored", "canceled", "cancel_accepted"}


def _archived(box: Outbox) -> int:
    with box.engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT COUNT(*) FROM outbox_archive").scalar_one())


def _stored(running: RunningCluster) -> int:
    return len(messages_of(running.folder / "broker"))


def reconcile(folder: Path, *, url: str, source: LedgerSource, broker_data: Path) -> dict[str, Any]:
    """Run it in a process of its own; returns the summary."""
    config = folder / "reconcile.toml"
    config.write_text(
        f'[database]\nurl = "{url}"\n[broker]\ndata = "{broker_data}"\n[delay]\nstore = "{source.store}"\n'
        f'[output]\nfolder = "{folder / "proof"}"\n[grace]\nseconds = 1\n'
    )
    command = [sys.executable, "-m", "outbox", "reconcile", "run", "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False)
    assert done.returncode in {0, 1}, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_errors_of_the_source_name_the_cure(
    running: RunningCluster, source: LedgerSource, cluster: BookKeeperCluster, zookeeper: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refusal(store: str = source.store) -> str:
        with pytest.raises(ConfigurationError) as refused:
            export_delay(LedgerSource(store=store), tmp_path / uuid.uuid4().hex, seconds_max=EXPORT_SECONDS_MAX)
        return str(refused.value)

    assert "outbox delay init" in refusal(f"bookkeeper://{cluster.zookeeper_hosts}/nowhere")
    path = f"/{source.store.partition('//')[2].partition('/')[2]}/shards/0-0000"
    zookeeper.create(path, b'{"format": 99}', makepath=True)
    assert "has version 99; this code reads version 2: upgrade" in refusal()
    node = '{"format": %d, "cluster": "c", "shard": "0-0000", "epoch": 1, "ledger": 1}'
    zookeeper.set(path, (node % 1).encode())
    assert "drain the cluster with the version that wrote it, and begin at an empty ZooKeeper path" in refusal()
    zookeeper.set(path, (node % 2).encode())
    assert "name this cluster's own ZooKeeper path" in refusal()
    monkeypatch.setitem(os.environ, JARS_VARIABLE, str(tmp_path))
    assert "install the wheel outbox-mq-bookkeeper-jars" in refusal()
