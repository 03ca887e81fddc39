"""Spans to look at, and a broker to watch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.outbox.telemetry.spans import Spans
from tests.outbox.watched_broker import WatchedBroker


@pytest.fixture
def spans() -> Iterator[Spans]:
    """A tracer provider that keeps every span."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Spans(provider, exporter)
    provider.shutdown()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedBroker]:
    """A broker to watch."""
    broker = WatchedBroker(tmp_path / "watched")
    yield broker
    broker.close()
