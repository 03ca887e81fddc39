"""Spans by OpenTelemetry's semantic conventions for messaging (1.44.0). Exporting them is OpenTelemetry's SDK's part.

create   PRODUCER  in the business trace, at publish(); the headers traceparent and tracestate propagate its context
send     CLIENT    a new trace, linked to each message's creation: a message may be sent two years later
receive  CLIENT    a pull that returned deliveries
process  CONSUMER  the handler, linked to the creation, or as its child if configured
ack, nack CLIENT   the settlement

Spans outside a business call begin in an empty context, or any current span would become their parent. Baggage is not
propagated: it may contain personal data, and the row outlives the request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    ProxyTracerProvider,
    Span,
    SpanKind,
    TracerProvider,
    get_current_span,
    get_tracer,
    get_tracer_provider,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from outbox.telemetry.failure_log import hide_values
from outbox.telemetry.ports import HandlingAttempt, SendAttempt, Settlement
from outbox_core.messages.limits import HEADERS_BYTES_MAX, HEADERS_MAX
from outbox_core.messages.message import Delivery, Message

TRACER: Final = "outbox-mq"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM: Final = "outbox"
LINKS_MAX: Final = 128
"""The limit of links of a span, as the SDK's default. A larger batch has links to its first messages, and its count."""

ASK_SECONDS: Final = 1.0
TRACEPARENT: Final = "traceparent"
_CONTEXT_BYTES_MAX: Final = 600
"""The length of both headers at most: 55 characters, and the 512 that the W3C requires, with their names."""

_EMPTY: Final = Context()
_NOTHING: Final = nullcontext()
_propagator: Final = TraceContextTextMapPropagator()


class Relation(StrEnum):
    """The relation of a process span to the message's creation: a link by default, or its child."""

    LINK = "link"
    PARENT = "parent"


class OpenTelemetryTracing:
    """Tracing with the given tracer provider, by default OpenTelemetry's global one, whenever that is set."""

    def __init__(self, *, provider: TracerProvider | None = None, process: Relation | str = Relation.LINK) -> None:
        self._tracer = get_tracer(TRACER, tracer_provider=provider, schema_url=SCHEMA_URL)
        self._process = Relation(process)
        self._live = provider is not None
        self._ask_again_at = 0.0

    def stamp(self, headers: dict[str, str], *, topic: str, message_id: str) -> None:
        """Make the span `create TOPIC` and add its context to the headers; a user's own traceparent takes precedence.

        Without a tracer provider, but within a remote trace, adds that trace's context.
        """
        if TRACEPARENT in headers:
            return
        span = self._tracer.start_span(
            f"create {topic}",
            None,  # None is the current context, that of the business call
            SpanKind.PRODUCER,
            {
                "messaging.system": SYSTEM,
                "messaging.operation.name": "create",
                "messaging.operation.type": "create",
                "messaging.destination.name": topic,
                "messaging.message.id": message_id,
            },
        )
        if span is INVALID_SPAN:  # no tracer provider, and no current trace
            return
        span.end()
        if _may_carry(headers):
            _propagator.inject(headers, set_span_in_context(span, _EMPTY))

    def sending(self, messages: Sequence[Message], sending: SendAttempt) -> AbstractContextManager[None]:
        """Makes the span `send TOPIC`, or `send` for a batch of several topics. It is current in the adapter, so that
        spans of its HTTP client are its children.
        """
        return self._sending(messages, sending) if self._is_live() else _NOTHING

    def handling(self, delivery: Delivery, handling: HandlingAttempt, *, group: str) -> AbstractContextManager[None]:
        """Makes the span `process TOPIC`; current in the handler, also in an `async def` one."""
        return self._handling(delivery, handling, group) if self._is_live() else _NOTHING

    def settling(
        self, settlement: Settlement, deliveries: Sequence[Delivery], *, group: str
    ) -> AbstractContextManager[None]:
        """Makes the span `ack TOPIC` or `nack TOPIC`."""
        return self._settling(settlement, deliveries, group) if self._is_live() else _NOTHING

    @contextmanager
    def _sending(self, messages: Sequence[Message], sending: SendAttempt) -> Iterator[None]:
        topics = {message.topic for message in messages}
        attributes = _of("send", topic=messages[0].topic if len(topics) == 1 else None, messages=messages)
        attributes["messaging.outbox.path"] = str(sending.path)
        created = min((message.created_at_ms for message in messages), default=0)
        if created:
            attributes["messaging.outbox.dwell_seconds"] = max(0.0, time.time() - created / 1000)
        with self._span("send", attributes, kind=SpanKind.CLIENT, links=_links(messages)) as span:
            yield
            rejected = sum(not result.status.is_success for result in sending.results)
            if rejected:
                span.set_attribute("messaging.outbox.rejected_count", rejected)
                _fail(span, "rejected")

    def received(self, topic: str, group: str, *, deliveries: Sequence[Delivery], started_at_ns: int) -> None:
        """Makes the span `receive TOPIC` once the pull has returned deliveries."""
        if not deliveries or not self._is_live():
            return
        self._tracer.start_span(
            f"receive {topic}",
            context=_EMPTY,
            kind=SpanKind.CLIENT,
            attributes=_of("receive", topic=topic, group=group, messages=deliveries),
            links=_links(deliveries),
            start_time=started_at_ns,
        ).end()

    @contextmanager
    def _handling(self, delivery: Delivery, handling: HandlingAttempt, group: str) -> Iterator[None]:
        attributes = _of("process", topic=delivery.topic, group=group, messages=[delivery])
        attributes["messaging.outbox.delivery_attempt"] = delivery.attempt
        linked = self._process is Relation.LINK
        parent, links = (_EMPTY, _links([delivery])) if linked else (_carried(delivery.headers), [])
        with self._span("process", attributes, kind=SpanKind.CONSUMER, links=links, parent=parent) as span:
            yield
            span.set_attribute("messaging.outbox.outcome", handling.outcome)
            if handling.error is not None:
                hide_values(handling.error)
                with suppress(Exception):  # an error whose text cannot be made
                    span.record_exception(handling.error)
                _fail(span, type(handling.error).__qualname__)

    @contextmanager
    def _settling(self, settlement: Settlement, deliveries: Sequence[Delivery], group: str) -> Iterator[None]:
        attributes = _of(settlement, topic=deliveries[0].topic, group=group, messages=deliveries)
        with self._span(settlement, attributes, kind=SpanKind.CLIENT, links=_links(deliveries)):
            yield

    def _is_live(self) -> bool:
        """Returns whether there is a tracer provider. Once one is set, there always is; until then this checks once a
        second, because of the cost.
        """
        if not self._live and (now := time.monotonic()) >= self._ask_again_at:
            self._ask_again_at = now + ASK_SECONDS
            self._live = not isinstance(get_tracer_provider(), ProxyTracerProvider)
        return self._live

    @contextmanager
    def _span(
        self,
        operation: str,
        attributes: dict[str, AttributeValue],
        *,
        kind: SpanKind,
        links: Sequence[Link],
        parent: Context = _EMPTY,
    ) -> Iterator[Span]:
        topic = attributes.get("messaging.destination.name")
        span = self._tracer.start_span(
            f"{operation} {topic}" if topic else operation,
            context=parent,
            kind=kind,
            attributes=attributes,
            links=links,
        )
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                _fail(span, type(error).__qualname__)
                raise


def current_ids() -> dict[str, str]:
    """Returns the current span's ids, in hexadecimal; empty outside a trace."""
    context = get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _of(
    operation: str, *, topic: str | None, messages: Sequence[Message | Delivery], group: str | None = None
) -> dict[str, AttributeValue]:
    kind = "settle" if operation in {"ack", "nack"} else operation
    attributes: dict[str, AttributeValue] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": str(operation),
        "messaging.operation.type": kind,
    }
    if topic is not None:
        attributes["messaging.destination.name"] = topic
    if group is not None:
        attributes["messaging.consumer.group.name"] = group
    if len(messages) == 1:
        attributes["messaging.message.id"] = messages[0].id
    if len(messages) > 1 or operation in {"send", "receive"}:
        attributes["messaging.batch.message_count"] = len(messages)
    return attributes


def _links(messages: Sequence[Message | Delivery]) -> list[Link]:
    """Returns links to the creation of each message whose headers have its context."""
    return [
        Link(context, {"messaging.message.id": message.id})
        for message in messages[:LINKS_MAX]
        if message.headers and (context := get_current_span(_carried(message.headers)).get_span_context()).is_valid
    ]


def _carried(headers: Mapping[str, str]) -> Context:
    """Returns the context from the headers. A transport may have changed the case of their names."""
    if TRACEPARENT not in headers:
        headers = {name.lower(): value for name, value in headers.items()}
        if TRACEPARENT not in headers:
            return _EMPTY
    return _propagator.extract(headers, context=_EMPTY)


def _may_carry(headers: Mapping[str, str]) -> bool:
    """Returns whether there is no traceparent yet, and room for ours: a trace must not make a message invalid."""
    if len(headers) > HEADERS_MAX - 2:
        return False
    room = HEADERS_BYTES_MAX - _CONTEXT_BYTES_MAX
    for name, value in headers.items():
        if name.lower() == TRACEPARENT or not isinstance(value, str):
            return False
        room -= len(name) + 4 * len(value)
    return room >= 0


def _fail(span: Span, error_type: str) -> None:
    """Records only the error's type: its text may contain data of a body."""
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR))
