"""The demo with its reminders on a delay cluster: on BookKeeper servers that it starts, and on such that are there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.bookkeeper.cluster import BookKeeperCluster
from tests.engines.java_server import java_home
from tests.outbox_broker.cluster.conftest import eventually
from tests.outbox_demo.delay_demo import check_delay_demo

if TYPE_CHECKING:
    from outbox_broker.cluster.bookkeeper.java_ledgers import JavaLedgers


DEPLOY = Path(__file__).parents[3] / "deploy" / "bookkeeper-jars"


@pytest.fixture
def from_wheel(jars: Path, tmp_path: Path) -> Mapping[str, str]:
    """What the demo needs to find Java and, as a package, the wheel of jars. The wheel's pom is that of our jars."""
    source = tmp_path / "source"
    shutil.copytree(DEPLOY, source)
    shutil.copytree(jars, source / "outbox_mq_bookkeeper_jars" / "jars", dirs_exist_ok=True)
    built, site = tmp_path / "built", tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built], cwd=source, check=True
    )
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    return {"OUTBOX_BOOKKEEPER_JARS": "", "PYTHONPATH": str(site), "JAVA_HOME": str(java_home())}


@pytest.fixture
def environment(jars: Path) -> Mapping[str, str]:
    """What the demo needs to find Java and the jars."""
    return {"OUTBOX_BOOKKEEPER_JARS": str(jars), "JAVA_HOME": str(java_home())}


def test_each_reminder_comes_once_is_canceled_or_waits_although_a_bookie_an_owner_and_a_session_are_lost(
    from_wheel: Mapping[str, str], tmp_path: Path
) -> None:
    said = check_delay_demo(tmp_path / "run", "bookkeeper:", environment=from_wheel)

    assert "a bookie, an owner of shards and a consumer killed" in said
    assert "the other node owns all shards" in said
    assert "it went on, and owns shards again, by a new session" in said
    assert "fenced" not in said


def test_servers_that_are_there_already_are_left_as_they_were(
    cluster: BookKeeperCluster, ledgers: JavaLedgers, zookeeper: Any, environment: Mapping[str, str], tmp_path: Path
) -> None:
    before = {ledger_id for ledger_id, _ in ledgers.find()}
    own = {"OUTBOX_CLUSTER__LEDGERS_URI": cluster.metadata_uri}

    said = check_delay_demo(
        tmp_path / "run", f"bookkeeper://{cluster.zookeeper_hosts}/a/demo", environment={**environment, **own}
    )

    assert "an owner of shards and a consumer killed" in said
    assert "bookie" not in said
    zookeeper.sync("/a/demo")  # the server that is asked may be behind the one that the demo asked last
    assert zookeeper.get_children("/a/demo") == []
    eventually(lambda: {ledger_id for ledger_id, _ in ledgers.find()} == before, what="the ledgers of before")
