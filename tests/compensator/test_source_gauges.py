"""The gauges of a source: there where an alarm needs them, on the instance that serves the source and on no other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from compensator.admission.circuit_breaker import OUT_WITHOUT_PROBE_MS
from compensator.core.batch_totals import BatchTotals
from compensator.retention.retention import Retention, RetentionOptions
from compensator.service.source_upkeep import Upkeep, UpkeepOptions
from compensator.work.source import SourceCounts
from compensator.work.source_schedule import NoRowsDue
from compensator.work.source_turn import TurnReport
from outbox.consumers.inbox_table import InboxStore
from outbox.store.archive_purge import ArchiveStore
from outbox.store.order_table import OrderStore
from outbox_core import ManualClock, Message, SystemClock
from outbox_core.common.errors import BrokerThrottled, BrokerUnavailable
from tests.compensator.serving import HOUR_US, QUICK_BREAKER, Serve, Sources, WatchedMetrics, advance_until, name_of
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

BREAKER_OPEN = "outbox_compensator_breaker_open"
OLDEST_DUE = "outbox_oldest_due_age_seconds"
LAST_SUCCESS = "outbox_compensator_last_success_timestamp_seconds"


def test_a_source_that_was_never_served_well_has_a_last_success_of_zero(
    sqlite_shop: Shop, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    source = name_of(sqlite_shop)
    sqlite_shop.execute("ALTER TABLE outbox_message RENAME TO hidden")

    serve(sqlite_shop, broker).start()
    metrics.wait_for(lambda it: it.failures[source] >= 2)

    assert metrics.value(LAST_SUCCESS, source=source) == 0


def test_a_beat_that_changes_the_assignment_keeps_the_last_success_of_a_source_that_stays(
    sqlite_shop: Shop, broker: RecordingBroker, serve: Serve, metrics: WatchedMetrics
) -> None:
    source = name_of(sqlite_shop)
    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, broker)
    service.start()
    metrics.wait_for(lambda it: it.accepted == 1)
    service.stop()

    metrics.set_served({source: True, "another": True})

    assert (metrics.value(LAST_SUCCESS, source=source) or 0) > 0
    assert metrics.value(LAST_SUCCESS, source="another") == 0


def test_a_broker_that_was_out_is_not_reported_for_ever_where_nothing_is_due_for_it_any_more(
    sqlite_shop: Shop, serve: Serve, metrics: WatchedMetrics
) -> None:
    def refuse(_batch: Sequence[Message]) -> None:
        raise BrokerUnavailable("down")

    clock, broker = ManualClock(), RecordingBroker(refuse)
    labels = {"broker": f"broker {id(broker)}"}
    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, broker, clock=clock)
    before = metrics.value(BREAKER_OPEN, **labels)
    service.start()
    metrics.wait_for(lambda it: it.breakers == ["open"])
    out = metrics.value(BREAKER_OPEN, **labels)

    sqlite_shop.execute("DELETE FROM outbox_message")  # as another instance does that drains the backlog
    clock.advance(OUT_WITHOUT_PROBE_MS + QUICK_BREAKER.backoff.max_ms)

    assert (before, out, metrics.value(BREAKER_OPEN, **labels)) == (0, 1, 0)


def test_what_ends_after_its_source_was_given_away_brings_back_no_gauge(metrics: WatchedMetrics) -> None:
    late = TurnReport(outcome=NoRowsDue(found=True), report=BatchTotals(claimed=1, parked=1), oldest_due_us=HOUR_US)
    metrics.set_served({"source": True})
    metrics.record_turn("source", late, seconds=1, now_seconds=1)
    ours = metrics.value(OLDEST_DUE, source="source")

    metrics.set_served({"source": False})
    metrics.record_turn("source", late, seconds=1, now_seconds=2)
    metrics.set_counts("source", SourceCounts(pending=1, retrying=1, parked=1), now_seconds=2)

    assert ours == HOUR_US / 1_000_000
    for gauge in (OLDEST_DUE, LAST_SUCCESS, "outbox_parked_messages", "outbox_pending_messages"):
        assert metrics.value(gauge, source="source") is None
    assert metrics.value("outbox_compensator_rows_total", outcome="parked") == 2, "what was done counts all the same"


def test_a_count_and_a_round_of_retention_that_the_database_refuses_count_as_failures(
    sqlite_shop: Shop, broker: RecordingBroker, sources: Sources, metrics: WatchedMetrics
) -> None:
    dialect, engine = sqlite_shop.engine.dialect, sqlite_shop.background_engine()
    retention = Retention(
        engine=engine,
        archive=ArchiveStore(dialect=dialect, schema=None),
        inbox=InboxStore(dialect=dialect, schema=None),
        order=OrderStore(dialect=dialect, schema=None),
        options=RetentionOptions(inbox_days=1),
    )
    source = sources(sqlite_shop, broker, retention=retention)
    upkeep = Upkeep(metrics, options=UpkeepOptions(), clock=SystemClock(), stopping=threading.Event())
    for table in ("message", "inbox"):
        sqlite_shop.execute(f"ALTER TABLE outbox_{table} RENAME TO hidden_{table}")

    upkeep.count([source])
    upkeep.retain([source])

    for task in ("gauges", "retention"):
        assert metrics.value("outbox_compensator_periodic_task_failures_total", task=task) == 1


def test_a_broker_that_asks_for_a_pause_of_an_hour_leaves_the_compensator_ready(
    sqlite_shop: Shop, serve: Serve, metrics: WatchedMetrics
) -> None:
    def throttle(_batch: Sequence[Message]) -> None:
        raise BrokerThrottled("slow down", retry_after_ms=3_600_000)

    clock, broker, source = ManualClock(), RecordingBroker(throttle), name_of(sqlite_shop)
    sqlite_shop.add_due(1)
    service = serve(sqlite_shop, broker, clock=clock)
    service.start()
    metrics.wait_for(lambda it: it.breakers == ["open"])

    for _ in range(3):
        clock.advance(20_000)
        now_s = clock.now_ms() / 1_000
        # A turn that was ending meanwhile makes the next one due a little later.
        advance_until(clock, lambda now_s=now_s: (metrics.value(LAST_SUCCESS, source=source) or 0) >= now_s)

    assert {check.name: check.status for check in service.health().checks}["turns"] == "ok"
    assert len(broker.batches) == 1
