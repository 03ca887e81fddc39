"""The main job on a Redis cluster: everything is killed but the servers, and the keys of the run are gone after it."""

from __future__ import annotations

from pathlib import Path

from tests.engines.redis.faulty_cluster import FaultyRedisCluster
from tests.outbox_demo.foreign_demo import check_main_job


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    faulty: FaultyRedisCluster, tmp_path: Path
) -> None:
    before = faulty.keys()

    check_main_job(tmp_path / "run", faulty.url)

    assert faulty.keys() == before
