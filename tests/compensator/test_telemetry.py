"""What a compensator tells of its sends: metrics by path, spans that link to where each message was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.orm import Session

from compensator.core.config import load
from compensator.entry.composition import wire
from compensator.entry.single_pass import run_single_pass
from outbox import Telemetry
from outbox.telemetry.metrics import OutboxMetrics
from outbox.telemetry.tracing import OpenTelemetryTracing
from outbox_core import ManualClock, SystemClock
from tests.compensator.serving import Sources, turns_of
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Shop
from tests.outbox.telemetry.spans import Spans, context_of, ids, linked


@pytest.fixture
def spans() -> Iterator[Spans]:
    """A tracer provider that keeps every span."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Spans(provider, exporter)
    provider.shutdown()


def test_a_compensators_send_is_a_span_that_links_to_where_the_message_was_made_and_is_counted_as_its_own(
    shop: Shop, broker: RecordingBroker, sources: Sources, clock: ManualClock, spans: Spans
) -> None:
    counted = OutboxMetrics()
    telemetry = Telemetry(metrics=counted, tracing=OpenTelemetryTracing(provider=spans.provider))
    box = shop.box(broker, telemetry=telemetry, sender=NO_SENDER)

    with spans.tracer.start_as_current_span("POST /orders"), Session(shop.engine) as session, session.begin():
        box.publish("orders", "1", session=session)
    shop.end_leases()
    source = sources(shop, broker, telemetry=telemetry)
    turns_of(source, clock=clock).take(going_on=lambda: True)

    created, sent = spans.one("create"), spans.one("send")
    assert linked(sent) == [ids(created)]
    assert context_of(sent).trace_id != context_of(created).trace_id
    assert _acknowledged(counted, "orders") == {"compensator": 1, "inline": None}


def test_a_compensator_that_is_put_together_from_its_configuration_counts_what_it_sends(
    sqlite_shop: Shop, tmp_path: Path
) -> None:
    sqlite_shop.add_due(3, topic="orders")
    sources = [{"url": sqlite_shop.database.url}]
    flags = {"broker": {"url": f"embedded:{tmp_path / 'data'}"}, "compensator": {"sources": sources}}
    parts = wire(load(flags, file=None), clock=SystemClock())

    try:
        report, errors = run_single_pass(parts.sources, options=parts.options.turn, clock=SystemClock())
    finally:
        parts.close()

    assert (report.accepted, errors) == (3, [])
    assert _acknowledged(parts.metrics, "orders") == {"compensator": 3, "inline": None}


def _acknowledged(metrics: object, topic: str) -> dict[str, float | None]:
    return {
        path: metrics.registry.get_sample_value(  # type: ignore[attr-defined]
            "outbox_messages_acknowledged_total", {"topic": topic, "path": path}
        )
        for path in ("compensator", "inline")
    }
