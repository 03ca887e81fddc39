"""The main job on Kafka: everything is killed but the node, and the topics and groups of the run are gone after it."""

from __future__ import annotations

from pathlib import Path

from tests.engines.kafka.kafka_cluster import ANSWER_SECONDS_MAX, KafkaCluster
from tests.engines.kafka.kafka_engine import KafkaEngine
from tests.examples.foreign_consumer import wait_until
from tests.outbox_demo.foreign_demo import check_main_job


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    node: KafkaCluster, own_engine: KafkaEngine, tmp_path: Path
) -> None:
    check_main_job(tmp_path / "run", own_engine.url)

    wait_until(lambda: not _left(node))


def _left(node: KafkaCluster) -> list[str]:
    """Topics and groups of a run."""
    groups = node.admin.list_consumer_groups().result(ANSWER_SECONDS_MAX).valid or []
    names = [*node.admin.list_topics(timeout=ANSWER_SECONDS_MAX).topics, *(group.group_id for group in groups)]
    return [name for name in names if name.startswith("outbox-demo-")]
