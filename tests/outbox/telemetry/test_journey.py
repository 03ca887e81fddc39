"""A trace goes through the row, the broker and the consumer, sent at once or years later by the compensator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from sqlalchemy.orm import Session

from outbox import Telemetry, consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.telemetry.metrics import OutboxMetrics
from outbox.telemetry.tracing import OpenTelemetryTracing
from outbox_core import Message, PublishResult
from outbox_core.common.backoff import Backoff
from outbox_core.common.errors import BrokerUnavailable
from tests.outbox.shop import NO_SENDER, Payment, Shop
from tests.outbox.telemetry.spans import Spans, attributes, context_of, ids, linked
from tests.outbox.watched_broker import WatchedBroker

SHORT = Backoff(initial_ms=1, max_ms=2)


def consume(
    shop: Shop, watched: WatchedBroker, telemetry: Telemetry, count: int = 1, fails: Callable[..., object] | None = None
) -> list[trace.SpanContext]:
    """Consume so many messages; what span each handler saw as the current one."""
    seen: list[trace.SpanContext] = []

    @consumer("orders", group="g", inbox=shop.engine, schema=shop.database.schema)
    def handle(session: Session, one: Any) -> None:
        seen.append(trace.get_current_span().get_span_context())
        if fails is not None:
            fails(one)
        session.add(Payment(id=len(seen)))

    with ConsumerRunner([handle], broker=watched, telemetry=telemetry, pauses=SHORT):
        watched.wait_for(lambda: watched.acked == count)
    return seen


def test_from_the_business_call_to_the_handler_one_link_apart(shop: Shop, watched: WatchedBroker, spans: Spans) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))
    box = shop.box(watched, telemetry=telemetry)

    with (
        spans.tracer.start_as_current_span("POST /orders") as business,
        Session(shop.engine) as session,
        session.begin(),
    ):
        box.publish("orders", {"n": 1}, session=session)
    seen = consume(shop, watched, telemetry)
    box.close()

    created, sent, processed = spans.one("create"), spans.one("send"), spans.one("process")
    assert context_of(created).trace_id == business.get_span_context().trace_id
    for linking in (sent, spans.one("receive"), processed, spans.one("ack")):
        assert linked(linking) == [ids(created)]
    assert len({context_of(span).trace_id for span in (created, sent, processed)}) == 3
    assert [one.span_id for one in seen] == [ids(processed)[1]]
    assert attributes(sent)["messaging.outbox.dwell_seconds"] != 0
    assert attributes(processed)["messaging.outbox.outcome"] == "handled"


def test_a_resend_by_the_compensator_carries_the_same_context(shop: Shop, watched: WatchedBroker, spans: Spans) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))
    box = shop.box(watched, telemetry=telemetry, sender=NO_SENDER)

    with spans.tracer.start_as_current_span("POST /orders"), Session(shop.engine) as session, session.begin():
        message = box.publish("orders", {"n": 1}, session=session)
    shop.end_leases()
    report = shop.scan(watched).run()
    consume(shop, watched, telemetry)

    assert report.accepted == 1
    assert spans.all("send") == []  # this compensator makes no spans: the context is in the row
    assert linked(spans.one("process")) == [ids(spans.one("create"))]
    assert f"{ids(spans.one('create'))[0]:032x}" in message.headers["traceparent"]


@pytest.mark.slow
def test_a_redelivery_is_a_span_of_its_own_with_its_attempt(shop: Shop, watched: WatchedBroker, spans: Spans) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))
    box = shop.box(watched, telemetry=telemetry)

    def fail_at_first(one: Any) -> None:
        if one.attempt == 1:
            raise RuntimeError("the printer jams")

    with Session(shop.engine) as session, session.begin():
        box.publish("orders", {"n": "secret"}, session=session)
    consume(shop, watched, telemetry, fails=fail_at_first)
    box.close()

    first, second = spans.all("process")
    assert [attributes(one)["messaging.outbox.delivery_attempt"] for one in (first, second)] == [1, 2]
    assert [attributes(one)["messaging.outbox.outcome"] for one in (first, second)] == ["failed", "handled"]
    assert attributes(first)["error.type"] == "RuntimeError"
    assert linked(first) == linked(second) == linked(spans.one("nack")) == [ids(spans.one("create"))]
    assert [[event.attributes["exception.message"] for event in one.events] for one in (first, second)] == [
        ["the printer jams"], [],
    ]  # fmt: skip
    assert not any("secret" in span.to_json() for span in spans.exporter.get_finished_spans())


def test_a_message_without_a_trace_is_delivered_without_a_link(
    shop: Shop, watched: WatchedBroker, spans: Spans
) -> None:
    box = shop.box(watched)

    with Session(shop.engine) as session, session.begin():
        message = box.publish("orders", b"1", session=session)
    consume(shop, watched, Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider)))
    box.close()

    assert dict(message.headers) == {}
    assert spans.one("process").links == ()


def test_what_an_outbox_and_a_consumer_did_is_counted(sqlite_shop: Shop, watched: WatchedBroker) -> None:
    metrics = OutboxMetrics()
    telemetry = Telemetry(metrics=metrics)
    box = sqlite_shop.box(watched, telemetry=telemetry)

    with Session(sqlite_shop.engine) as session:
        session.begin()
        box.publish("orders", "rolled back", session=session)
        session.rollback()
    with Session(sqlite_shop.engine) as session, session.begin():
        for number in range(3):
            box.publish("orders", str(number), session=session)
    assert box.close()
    consume(sqlite_shop, watched, telemetry, count=3)

    value = metrics.registry.get_sample_value
    assert value("outbox_messages_enqueued_total", {"topic": "orders"}) == 3
    assert value("outbox_send_attempts_total", {"topic": "orders"}) == 3
    assert value("outbox_messages_acknowledged_total", {"topic": "orders", "path": "inline"}) == 3
    assert value("outbox_commit_to_ack_seconds_count", {"topic": "orders"}) == 3
    assert value("outbox_sender_queue_rows") == 0
    labels = {"topic": "orders", "group": "g"}
    assert value("outbox_consumer_messages_received_total", labels) == 3
    assert value("outbox_consumer_messages_handled_total", {**labels, "outcome": "handled"}) == 3


def test_a_full_queue_and_a_dead_broker_are_counted(sqlite_shop: Shop, watched: WatchedBroker) -> None:
    metrics = OutboxMetrics()
    full = sqlite_shop.box(watched, telemetry=Telemetry(metrics=metrics), sender=NO_SENDER)
    dead = sqlite_shop.box(DeadBroker(watched), telemetry=Telemetry(metrics=metrics))

    for box in (full, dead):
        with Session(sqlite_shop.engine) as session, session.begin():
            box.publish("orders", "1", session=session)
        box.close()

    value = metrics.registry.get_sample_value
    assert value("outbox_messages_enqueued_total", {"topic": "orders"}) == 2
    assert value("outbox_sender_dropped_rows_total") == 1
    assert value("outbox_send_failures_total", {"topic": "orders", "reason": "unavailable"}) == 1


class DeadBroker:
    """Takes nothing."""

    def __init__(self, broker: WatchedBroker) -> None:
        self._broker = broker

    def publish(self, _batch: list[Message]) -> list[PublishResult]:
        raise BrokerUnavailable("down")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def test_spans_of_the_business_are_not_adopted_by_the_sender(
    sqlite_shop: Shop, watched: WatchedBroker, spans: Spans
) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))
    box = sqlite_shop.box(watched, telemetry=telemetry)

    # The first commit starts the sender's thread: inside a span, whose context a thread must not inherit.
    with spans.tracer.start_as_current_span("POST /orders"), Session(sqlite_shop.engine) as session, session.begin():
        box.publish("orders", "1", session=session)
    box.close()

    assert spans.one("send").parent is None
