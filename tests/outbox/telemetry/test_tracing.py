"""Spans: what is named, kinds, links and attributes by the conventions; the trace travels, and never in the way."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.exc import StatementError

from outbox import Telemetry
from outbox.telemetry import HandlingAttempt, SendAttempt, SendPath, Settlement
from outbox.telemetry.tracing import ASK_SECONDS, LINKS_MAX, SCHEMA_URL, OpenTelemetryTracing, Relation
from outbox_core import Delivery, Message, PublishResult, PublishStatus
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.messages.limits import HEADERS_MAX
from tests.outbox.telemetry.spans import Spans, attributes, context_of, ids, linked

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CREATION = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


def message(number: int = 1, *, topic: str = "orders", traced: bool = True, created_at_ms: int = 0) -> Message:
    headers = {"traceparent": TRACEPARENT} if traced else {}
    return Message(id=f"m-{number}", topic=topic, body=b"", headers=headers, created_at_ms=created_at_ms)


def delivery(headers: Mapping[str, str] | None = None, *, attempt: int = 1) -> Delivery:
    headers = {"traceparent": TRACEPARENT} if headers is None else headers
    message = Message(id="m-1", topic="orders", body=b"", headers=headers)
    return Delivery(receipt="r-1", attempt=attempt, message=message)


def stamped(tracing: OpenTelemetryTracing, headers: dict[str, str] | None = None) -> dict[str, str]:
    headers = {} if headers is None else headers
    tracing.stamp(headers, topic="orders", message_id="m-1")
    return headers


def test_a_message_is_created_in_the_business_trace_and_its_context_travels_in_the_headers(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    with spans.tracer.start_as_current_span("POST /orders") as business:
        headers = stamped(tracing)

    created = spans.one("create")
    assert created.name == "create orders"
    assert created.kind is SpanKind.PRODUCER
    assert created.parent is not None
    assert created.parent.span_id == business.get_span_context().span_id
    assert list(headers) == ["traceparent"]
    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, int(trace_id, 16), int(span_id, 16)) == ("00", *ids(created))
    assert int(flags, 16) & trace.TraceFlags.SAMPLED
    assert attributes(created) == {
        "messaging.system": "outbox",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "orders",
        "messaging.message.id": "m-1",
    }
    assert created.instrumentation_scope is not None
    assert created.instrumentation_scope.schema_url == SCHEMA_URL


def test_the_trace_state_travels_along(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)
    state = trace.TraceState([("vendor", "x")])
    parent = trace.SpanContext(*CREATION, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state)

    with trace.use_span(trace.NonRecordingSpan(parent)):
        headers = stamped(tracing)

    assert headers["tracestate"] == "vendor=x"
    assert headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
def test_a_traceparent_of_the_users_own_wins(spans: Spans, name: str) -> None:
    headers = stamped(OpenTelemetryTracing(provider=spans.provider), {name: TRACEPARENT})

    assert headers == {name: TRACEPARENT}
    assert name != "traceparent" or spans.all("create") == []


def test_a_trace_never_makes_a_message_invalid(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)
    many = {f"header-{number}": "" for number in range(HEADERS_MAX - 1)}
    large = {"large": "x" * 32_000}
    wrong = {"wrong": 1}

    for headers in (many, large, wrong):
        assert stamped(tracing, dict(headers)) == headers  # type: ignore[arg-type]


def test_an_unsampled_trace_says_so_to_those_who_come_after() -> None:
    headers = stamped(OpenTelemetryTracing(provider=TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)))

    assert not int(headers["traceparent"].split("-")[3], 16) & trace.TraceFlags.SAMPLED


def test_without_a_provider_nothing_is_stamped_but_the_callers_own_trace() -> None:
    tracing = OpenTelemetryTracing()
    parent = trace.SpanContext(*CREATION, is_remote=True, trace_flags=trace.TraceFlags(1))

    outside = stamped(tracing)
    with trace.use_span(trace.NonRecordingSpan(parent)):
        inside = stamped(tracing)

    assert outside == {}
    assert inside == {"traceparent": TRACEPARENT}


def test_a_provider_that_is_set_later_is_found_and_looked_for_once_a_second(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[OpenTelemetryTracing.__module__]
    now, asked, provider = [100.0], [], [trace.ProxyTracerProvider()]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "get_tracer_provider", lambda: (asked.append(now[0]), provider[0])[1])
    monkeypatch.setattr(module, "get_tracer", lambda *_, **__: spans.tracer)
    tracing = OpenTelemetryTracing()

    def spans_after_a_send() -> int:
        with tracing.sending([message()], SendAttempt(path=SendPath.INLINE)):
            pass
        return len(spans.all("send"))

    found = [spans_after_a_send() for _ in range(5)]
    provider[0] = spans.provider  # type: ignore[call-overload]
    found.append(spans_after_a_send())
    now[0] += ASK_SECONDS
    found += [spans_after_a_send(), spans_after_a_send()]

    assert found == [0] * 6 + [1, 2]
    assert asked == [100.0, 101.0]


def test_a_send_is_a_trace_of_its_own_linked_to_each_creation(spans: Spans) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))
    an_hour_ago_ms = int(time.time() * 1000) - 3_600_000

    with (
        spans.tracer.start_as_current_span("ambient") as ambient,
        telemetry.sending(
            [message(1, created_at_ms=an_hour_ago_ms), message(2, traced=False, created_at_ms=an_hour_ago_ms + 5)],
            path=SendPath.INLINE,
        ),
    ):
        inside = trace.get_current_span().get_span_context()

    sent = spans.one("send")
    assert (sent.name, sent.kind, sent.parent) == ("send orders", SpanKind.CLIENT, None)
    assert context_of(sent).trace_id != ambient.get_span_context().trace_id
    assert inside.span_id == context_of(sent).span_id
    assert linked(sent) == [CREATION]
    dwell = attributes(sent)["messaging.outbox.dwell_seconds"]
    assert isinstance(dwell, float)
    assert dwell >= 3600
    assert attributes(sent)["messaging.outbox.path"] == "inline"
    assert attributes(sent)["messaging.batch.message_count"] == 2
    assert "messaging.message.id" not in attributes(sent)
    assert sent.status.status_code is StatusCode.UNSET


def test_a_batch_of_many_topics_names_none(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    with tracing.sending([message(1), message(2, topic="bills")], SendAttempt(path=SendPath.COMPENSATOR)):
        pass

    assert spans.one("send").name == "send"
    assert attributes(spans.one("send"))["messaging.outbox.path"] == "compensator"
    assert "messaging.destination.name" not in attributes(spans.one("send"))


def test_links_are_bounded_and_the_count_is_not(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    with tracing.sending([message(number) for number in range(500)], SendAttempt(path=SendPath.COMPENSATOR)):
        pass

    assert len(spans.one("send").links) == LINKS_MAX
    assert attributes(spans.one("send"))["messaging.batch.message_count"] == 500


def test_a_send_that_fails_says_how_and_nothing_of_what_the_error_says(spans: Spans) -> None:
    telemetry = Telemetry(tracing=OpenTelemetryTracing(provider=spans.provider))

    with pytest.raises(BrokerUnavailable), telemetry.sending([message()], path=SendPath.INLINE):
        raise BrokerUnavailable("secret")

    sent = spans.one("send")
    assert attributes(sent)["error.type"] == "BrokerUnavailable"
    assert sent.status.status_code is StatusCode.ERROR
    assert "secret" not in sent.to_json()


def test_a_send_of_which_a_part_was_rejected_is_an_error(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)
    sending = SendAttempt(path=SendPath.INLINE)

    with tracing.sending([message(1), message(2)], sending):
        sending.results = [PublishResult("m-1", PublishStatus.STORED), PublishResult("m-2", PublishStatus.REJECTED)]

    assert attributes(spans.one("send"))["error.type"] == "rejected"
    assert attributes(spans.one("send"))["messaging.outbox.rejected_count"] == 1


def test_a_delivery_is_processed_in_a_trace_of_its_own_linked_to_the_creation(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)
    handling = HandlingAttempt()

    with (
        spans.tracer.start_as_current_span("ambient"),
        tracing.handling(delivery({"Traceparent": TRACEPARENT}, attempt=3), handling, group="g"),
    ):
        inside = trace.get_current_span().get_span_context()
        handling.outcome = "handled"

    processed = spans.one("process")
    assert (processed.name, processed.kind, processed.parent) == ("process orders", SpanKind.CONSUMER, None)
    assert linked(processed) == [CREATION]
    assert inside.span_id == ids(processed)[1]
    assert attributes(processed) == {
        "messaging.system": "outbox",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "g",
        "messaging.message.id": "m-1",
        "messaging.outbox.delivery_attempt": 3,
        "messaging.outbox.outcome": "handled",
    }


def test_a_delivery_is_the_creations_child_where_that_was_asked_for(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider, process=Relation.PARENT)

    with tracing.handling(delivery(), HandlingAttempt(), group="g"):
        pass

    processed = spans.one("process")
    assert processed.parent is not None
    assert (processed.parent.trace_id, processed.parent.span_id) == CREATION
    assert processed.links == ()


def test_a_handler_that_fails_is_an_error_with_its_exception_as_an_event(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)
    handling, value = HandlingAttempt(), "47" + "11" * 8

    with tracing.handling(delivery(), handling, group="g"):
        with pytest.raises(StatementError) as caught:
            raise StatementError("no such table", "INSERT INTO nowhere VALUES (?)", (value,), None)
        handling.outcome, handling.error = "failed", caught.value

    processed = spans.one("process")
    [event] = processed.events
    assert attributes(processed)["error.type"] == "StatementError"
    assert processed.status.status_code is StatusCode.ERROR
    assert event.name == "exception"
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "sqlalchemy.exc.StatementError"
    assert "no such table" in str(event.attributes["exception.message"])
    assert __file__ in str(event.attributes["exception.stacktrace"])
    assert value not in processed.to_json()


def test_receive_and_settle_are_clients_linked_to_the_creation(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    tracing.received("orders", "g", deliveries=[delivery()], started_at_ns=1_000)
    tracing.received("orders", "g", deliveries=[], started_at_ns=1_000)
    for settlement in Settlement:
        with tracing.settling(settlement, [delivery()], group="g"):
            pass

    received, acked, nacked = spans.one("receive"), spans.one("ack"), spans.one("nack")
    assert received.start_time == 1_000
    assert [span.name for span in (received, acked, nacked)] == ["receive orders", "ack orders", "nack orders"]
    assert {span.kind for span in (received, acked, nacked)} == {SpanKind.CLIENT}
    assert {attributes(span)["messaging.operation.type"] for span in (acked, nacked)} == {"settle"}
    assert [linked(span) for span in (received, acked, nacked)] == [[CREATION]] * 3


@pytest.mark.parametrize(
    "traceparent",
    ["", "garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + TRACEPARENT[2:], TRACEPARENT + "\n" + "x"],
)
def test_a_traceparent_that_is_none_links_to_nothing(spans: Spans, traceparent: str) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    with tracing.handling(delivery({"traceparent": traceparent}), HandlingAttempt(), group="g"):
        pass

    assert spans.one("process").links == ()


def test_a_coroutine_sees_the_span_that_is_around_it(spans: Spans) -> None:
    tracing = OpenTelemetryTracing(provider=spans.provider)

    async def handler() -> int:
        await asyncio.sleep(0)
        return trace.get_current_span().get_span_context().span_id

    with tracing.handling(delivery(), HandlingAttempt(), group="g"):
        seen = asyncio.run(handler())

    assert seen == ids(spans.one("process"))[1]
