"""Telemetry: what the SDK, the relay and consumers tell of themselves, as spans and as metrics. It decides nothing.

`Telemetry()` follows OpenTelemetry where opentelemetry-api is installed, and counts nothing; give it `metrics=` and
`tracing=` for more or less. The two implementations import what they need, and this package imports neither:
outbox.telemetry.tracing (extra `otel`) and outbox.telemetry.metrics (extra `metrics`).
"""

from outbox.telemetry.hooks import NO_TELEMETRY, Telemetry, default_telemetry, trace_context
from outbox.telemetry.ports import NO_METRICS, NO_TRACING, Handling, Metrics, Sending, SendPath, Settlement, Tracing

__all__ = [
    "NO_METRICS",
    "NO_TELEMETRY",
    "NO_TRACING",
    "Handling",
    "Metrics",
    "SendPath",
    "Sending",
    "Settlement",
    "Telemetry",
    "Tracing",
    "default_telemetry",
    "trace_context",
]
