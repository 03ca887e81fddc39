"""The gauges of a source: there where an alarm needs them, on the instance that serves the source and on no other."""

from __future__ import annotations

from collections.abc import Callable

from compensator.service.service import CompensatorService
from tests.compensator.serving import WatchedMetrics, add_due, name_of
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop

Serve = Callable[..., CompensatorService]
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
    add_due(sqlite_shop, 1)
    service = serve(sqlite_shop, broker)
    service.start()
    metrics.wait_for(lambda it: it.accepted == 1)
    service.stop()

    metrics.set_served({source: True, "another": True})

    assert (metrics.value(LAST_SUCCESS, source=source) or 0) > 0
    assert metrics.value(LAST_SUCCESS, source="another") == 0
