"""`outbox delay status` and metrics of compensators that run: who serves each slot, and how far a rebuild is."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from typing import Any

from typer.testing import CliRunner

from compensator.assignment import open_assignment
from compensator.service.timer_worker import TimerWorker
from compensator.work.timer_rebuild import RebuildOptions
from outbox_broker.delay_service.cli import app
from outbox_core import SystemClock
from outbox_core.messages.connect import connect_timing
from outbox_core.messages.timing_port import TimingStore
from tests.broker_adapter.redis.redis_server import RedisServer, wait_until
from tests.compensator.serving import Serve, WatchedMetrics, name_of
from tests.compensator.timers.timer_workers import SLOTS, SOON, patient, publish, source_over, store_url
from tests.outbox.recording_broker import PromptBroker
from tests.outbox.shop import Shop

COUNT = 40
SLOWLY = replace(SOON, rebuild=RebuildOptions(page_rows=2, rows_per_second=2))


def slots_of(server: RedisServer) -> list[dict[str, Any]]:
    """As the command shows them."""
    output = CliRunner().invoke(app, ["status", "--store", patient(store_url(server)), "--json"]).output
    slots: list[dict[str, Any]] = json.loads(output)["slots"]
    return slots


def test_each_slot_has_the_compensator_that_serves_it_and_gauges_of_its_timers(
    sqlite_shop: Shop,
    server: RedisServer,
    prompt: PromptBroker,
    serve: Serve,
    metrics: WatchedMetrics,
) -> None:
    assignment = open_assignment(sqlite_shop.database.url)
    publish(sqlite_shop, prompt, store_url(server), count=COUNT)
    with source_over(sqlite_shop, prompt) as source:
        worker = TimerWorker(
            source, connect_timing(store_url(server)), options=SOON, metrics=metrics, clock=SystemClock()
        )
        service = serve(sqlite_shop, prompt, assignment=assignment, timers=[worker], timers_report_ms=50)
        service.start()
        found: list[dict[str, Any]] = []

        def all_served() -> bool:
            found[:] = slots_of(server)
            return all(is_served_and_rebuilt(slot) for slot in found)

        assert wait_until(all_served)
        gauges = [gauge(metrics, sqlite_shop, "timers", slot) for slot in range(SLOTS)]
        due = [gauge(metrics, sqlite_shop, "due_timers", slot) for slot in range(SLOTS)]
        answers = [gauge(metrics, sqlite_shop, "answers", slot) for slot in range(SLOTS)]
        instance = assignment.instance
        assert service.stop()

    servers = [{**slot["server"], "seen_ms_ago": 0} for slot in found]
    assert servers == [
        {
            "host": socket.gethostname(), "process": os.getpid(), "instance": instance, "rebuilt_rows": None,
            "rows_to_rebuild": None, "seen_ms_ago": 0,
        }
    ] * SLOTS  # fmt: skip
    assert gauges == [slot["timers"] for slot in found]
    assert sum(gauge or 0 for gauge in gauges) == COUNT
    assert due == [0] * SLOTS
    assert answers == [1] * SLOTS


def test_a_slot_that_is_assigned_no_more_has_no_gauges(
    sqlite_shop: Shop, server: RedisServer, store: TimingStore, prompt: PromptBroker, metrics: WatchedMetrics
) -> None:
    with source_over(sqlite_shop, prompt) as source:
        worker = TimerWorker(
            source, connect_timing(store_url(server)), options=SOON, metrics=metrics, clock=SystemClock()
        )
        worker.check()
        names = [resource.name for resource in worker.resources]
        worker.assign(names)
        worker.report("one")
        worker.assign(names[1:])
        worker.report("one")
        assert worker.stop(timeout_ms=60_000)

    assert gauge(metrics, sqlite_shop, "answers", 0) is None
    assert gauge(metrics, sqlite_shop, "answers", 1) == 1
    assert all(one.server is not None for one in store.statuses(range(SLOTS))), "announced for some seconds more"


def test_a_rebuild_shows_how_far_it_is(
    sqlite_shop: Shop,
    server: RedisServer,
    prompt: PromptBroker,
    serve: Serve,
    metrics: WatchedMetrics,
) -> None:
    publish(sqlite_shop, prompt, store_url(server), count=COUNT)
    with source_over(sqlite_shop, prompt) as source:
        worker = TimerWorker(
            source, connect_timing(store_url(server)), options=SLOWLY, metrics=metrics, clock=SystemClock()
        )
        service = serve(sqlite_shop, prompt, timers=[worker], timers_report_ms=50)
        service.start()
        found: list[dict[str, Any]] = []

        def all_rebuilt_in_part() -> bool:
            found[:] = slots_of(server)
            return all(is_rebuilt_in_part(slot) for slot in found)

        assert wait_until(all_rebuilt_in_part)
        assert {slot["server"]["rows_to_rebuild"] for slot in found} == {COUNT}
        assert wait_until(
            lambda: metrics.value("outbox_timing_store_rows_to_rebuild", source=name_of(sqlite_shop)) == COUNT
        )
        assert service.stop()


def is_served_and_rebuilt(slot: dict[str, Any]) -> bool:
    """Whether it is complete, and its server announced itself since then."""
    return slot["complete"] and bool(slot["server"]) and slot["server"]["rebuilt_rows"] is None


def is_rebuilt_in_part(slot: dict[str, Any]) -> bool:
    """Whether it is being rebuilt, and some rows were read."""
    return slot["state"] == "being rebuilt" and bool(slot["server"]) and (slot["server"]["rebuilt_rows"] or 0) > 0


def gauge(metrics: WatchedMetrics, shop: Shop, name: str, slot: int) -> float | None:
    """That of a slot."""
    return metrics.value(f"outbox_timing_store_slot_{name}", source=name_of(shop), slot=str(slot))
