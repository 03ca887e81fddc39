"""The main job on RocketMQ: everything is killed but the servers, and the run leaves no topic or group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.rocketmq.rocketmq_cluster import RocketMqCluster
from tests.outbox_demo.foreign_demo import check_main_job


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    cluster: RocketMqCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where RocketMQ's client logs

    check_main_job(tmp_path / "run", cluster.url())

    assert [name for name in cluster.client.names() if name.startswith("outbox-demo-")] == []
