"""Telemetry of the SDK, the relay and consumers: spans and metrics.

`Telemetry()` uses OpenTelemetry if opentelemetry-api is installed, and has no metrics; `metrics=` and `tracing=` change
that. This package does not import the two implementations, since they import optional libraries:
outbox.telemetry.tracing (extra `otel`) and outbox.telemetry.metrics (extra `metrics`).
"""

from outbox.telemetry.ports import (
    NO_METRICS,
    NO_TRACING,
    HandlingAttempt,
    Metrics,
    SendAttempt,
    SendPath,
    Settlement,
    Tracing,
)
from outbox.telemetry.telemetry import NO_TELEMETRY, Telemetry, default_telemetry, trace_context

__all__ = [
    "NO_METRICS",
    "NO_TELEMETRY",
    "NO_TRACING",
    "HandlingAttempt",
    "Metrics",
    "SendAttempt",
    "SendPath",
    "Settlement",
    "Telemetry",
    "Tracing",
    "default_telemetry",
    "trace_context",
]
