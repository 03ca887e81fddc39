"""The main job on a Redis cluster: everything is killed but the servers, and the keys of the run are gone after it; and
a timing store on a cluster that the demo starts, of which a master is killed.
"""

from __future__ import annotations

from pathlib import Path

from tests.broker_adapter.redis.redis_server import server_program
from tests.engines.redis.faulty_cluster import FaultyRedisCluster
from tests.outbox_demo.delay_demo import check_delay_demo, with_program
from tests.outbox_demo.foreign_demo import check_main_job


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    faulty: FaultyRedisCluster, tmp_path: Path
) -> None:
    before = faulty.keys()

    check_main_job(tmp_path / "run", faulty.url)

    assert faulty.keys() == before


def test_each_reminder_comes_once_is_canceled_or_waits_although_a_cluster_loses_everything_and_a_master(
    tmp_path: Path,
) -> None:
    said = check_delay_demo(tmp_path / "run", "redis+cluster:", environment=with_program(server_program()))

    assert "Redis has lost all timers: FLUSHALL on each master" in said
    assert "a master of the Redis cluster, a timer worker and a consumer killed" in said


def test_a_cluster_that_is_there_already_is_left_as_it_was(faulty: FaultyRedisCluster, tmp_path: Path) -> None:
    before = faulty.keys()

    check_delay_demo(tmp_path / "run", faulty.url.partition("?")[0])

    assert faulty.keys() == before
