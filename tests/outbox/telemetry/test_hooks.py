"""Telemetry where nothing is installed or wanted: everything works, and costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outbox import Telemetry
from outbox.telemetry import (
    NO_METRICS,
    NO_TELEMETRY,
    NO_TRACING,
    SendPath,
    Settlement,
    default_telemetry,
    trace_context,
)
from outbox.telemetry.tracing import OpenTelemetryTracing
from tests.outbox.telemetry.spans import Spans, ids
from tests.outbox.watched_broker import delivery, message

WITHOUT_LIBRARIES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"opentelemetry", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from outbox.telemetry import NO_METRICS, NO_TRACING, default_telemetry, trace_context
import outbox
telemetry = default_telemetry()
headers = {}
telemetry.stamp(headers, topic="orders", message_id="m-1")
print(telemetry.tracing is NO_TRACING, telemetry.metrics is NO_METRICS, headers, dict(trace_context()))
"""


@pytest.mark.processes
def test_without_the_libraries_the_null_implementations_are_chosen() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARIES], capture_output=True, text=True, timeout=300)

    assert ended.stdout.strip() == "True True {} {}", ended.stderr


def test_where_opentelemetry_is_installed_it_is_followed_and_chosen_once() -> None:
    assert isinstance(default_telemetry().tracing, OpenTelemetryTracing)
    assert default_telemetry() is default_telemetry()
    assert Telemetry().tracing is default_telemetry().tracing
    assert default_telemetry().metrics is NO_METRICS


@pytest.mark.processes
def test_importing_the_front_imports_no_library() -> None:
    program = (
        "import sys, outbox, outbox.telemetry; print({'opentelemetry', 'prometheus_client'} & "
        "{name.partition('.')[0] for name in sys.modules})"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)

    assert ended.stdout.strip() == "set()", ended.stderr


def test_no_telemetry_lets_everything_pass() -> None:
    headers: dict[str, str] = {}
    NO_TELEMETRY.stamp(headers, topic="orders", message_id="m-1")
    NO_TELEMETRY.committed([])
    NO_TELEMETRY.dropped(1)
    NO_TELEMETRY.watch_queue(lambda: 1)
    NO_TELEMETRY.counted("x", "orders", "g")
    NO_TELEMETRY.received("orders", "g", deliveries=[delivery()], started_at_ns=0)
    with NO_TELEMETRY.sending([message()], path=SendPath.INLINE) as sending:
        pass
    with NO_TELEMETRY.handling(delivery(), group="g") as handling:
        pass
    with NO_TELEMETRY.settling(Settlement.ACK, [delivery()], group="g"):
        pass

    assert headers == {}
    assert (sending.error, handling.error) == (None, None)
    assert NO_TELEMETRY.tracing is NO_TRACING


def test_an_error_passes_through_and_is_noted() -> None:
    with pytest.raises(KeyError), NO_TELEMETRY.sending([message()], path=SendPath.INLINE) as sending:
        raise KeyError("x")

    assert isinstance(sending.error, KeyError)


def test_logs_may_name_the_span_that_they_are_written_in(spans: Spans) -> None:
    outside = trace_context()
    with spans.tracer.start_as_current_span("POST /orders"):
        inside = trace_context()

    (business,) = spans.exporter.get_finished_spans()
    assert outside == {}
    assert inside == {"trace_id": f"{ids(business)[0]:032x}", "span_id": f"{ids(business)[1]:016x}"}
