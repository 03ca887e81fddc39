"""The spans that a test has made, and how it asks for them. Not a test."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, Tracer


@dataclass(frozen=True)
class Spans:
    """A provider, and what it has exported."""

    provider: TracerProvider
    exporter: InMemorySpanExporter

    @property
    def tracer(self) -> Tracer:
        """The business's own tracer."""
        return self.provider.get_tracer("shop")

    def all(self, operation: str) -> list[ReadableSpan]:
        """The spans whose name begins with this word, in the order of their ends."""
        return [span for span in self.exporter.get_finished_spans() if span.name.split()[0] == operation]

    def one(self, operation: str) -> ReadableSpan:
        """The only such span."""
        (found,) = self.all(operation)
        return found


def context_of(span: ReadableSpan) -> SpanContext:
    """A span's context, which is there."""
    assert span.context is not None
    return span.context


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    """The trace and span ids that a span links to."""
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def ids(span: ReadableSpan) -> tuple[int, int]:
    """A span's own trace and span ids."""
    return context_of(span).trace_id, context_of(span).span_id


def attributes(span: ReadableSpan) -> dict[str, object]:
    """A span's attributes."""
    return dict(span.attributes or {})
