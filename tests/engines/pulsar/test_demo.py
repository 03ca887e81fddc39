"""The main job on Pulsar: everything is killed but the server, and the topics of the run are gone after it."""

from __future__ import annotations

from pathlib import Path

from tests.engines.pulsar.pulsar_server import PulsarServer
from tests.outbox_demo.foreign_demo import check_main_job


def test_everything_that_was_paid_has_its_effects_once_although_worker_delay_service_and_consumer_are_killed(
    server: PulsarServer, tmp_path: Path
) -> None:
    check_main_job(tmp_path / "run", f"pulsar://{server.addresses}?admin={server.admin_url}")

    topics = server.ask("GET", "persistent/public/default").json()
    assert [name for name in topics if "outbox-demo-" in name] == []
