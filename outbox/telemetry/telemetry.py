"""Telemetry: reports events of the code to the ports Metrics and Tracing. Imports no library.

The Outbox, the sender, the relay and consumers share one Telemetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import TracebackType
from typing import ParamSpec

from outbox.store.row import OutboxRow
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
from outbox_core.messages.message import Delivery, Message
from outbox_core.runtime.event_logger import EventLogger

P = ParamSpec("P")

logger: EventLogger = EventLogger(__name__)


class Telemetry:
    """The facade that the Outbox, the sender, the relay and consumers call.

    `metrics`: e.g. outbox.telemetry.metrics.OutboxMetrics(); None: no metrics. `tracing`: None uses OpenTelemetry's
    global tracer provider if opentelemetry-api is installed; NO_TRACING makes no spans.
    """

    def __init__(self, *, metrics: Metrics | None = None, tracing: Tracing | None = None) -> None:
        self.metrics: Metrics = metrics if metrics is not None else NO_METRICS
        self.tracing: Tracing = tracing if tracing is not None else _installed_tracing()
        self._committed = _log_errors(self.metrics.committed)
        self._watch_queue = _log_errors(self.metrics.watch_queue)
        self._dropped = _log_errors(self.metrics.dropped)
        self._counted = _log_errors(self.metrics.counted)
        self._sent = _log_errors(self.metrics.sent)
        self._received = _log_errors(self.metrics.received)
        self._handled = _log_errors(self.metrics.handled)

    def stamp(self, headers: dict[str, str], *, topic: str, message_id: str) -> None:
        """As Tracing.stamp. Errors propagate: OpenTelemetry's API does not raise, and publish() has to be cheap."""
        self.tracing.stamp(headers, topic=topic, message_id=message_id)

    def committed(self, rows: Sequence[OutboxRow]) -> None:
        """As Metrics.committed; errors are only logged."""
        self._committed(rows)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """As Metrics.watch_queue; errors are only logged."""
        self._watch_queue(length)

    def dropped(self, rows: int) -> None:
        """As Metrics.dropped; errors are only logged."""
        self._dropped(rows)

    def counted(self, event: str, topic: str, group: str, *, by: int = 1) -> None:
        """As Metrics.counted; errors are only logged."""
        self._counted(event, topic, group, by=by)

    def handled(self, delivery: Delivery, handling: HandlingAttempt, *, group: str, seconds: float) -> None:
        """As Metrics.handled; errors are only logged."""
        self._handled(delivery, handling, group=group, seconds=seconds)

    @contextmanager
    def sending(self, messages: Sequence[Message], *, path: SendPath) -> Iterator[SendAttempt]:
        """Wraps broker.publish(messages); the caller sets `results` of the yielded value to what it returned."""
        sending = SendAttempt(path=path)
        started = time.perf_counter()
        try:
            with self.tracing.sending(messages, sending):
                try:
                    yield sending
                except BaseException as error:
                    sending.error = error
                    raise
        finally:
            self._sent(messages, sending, path=path, seconds=time.perf_counter() - started)

    def received(self, topic: str, group: str, *, deliveries: Sequence[Delivery], started_at_ns: int) -> None:
        """Report the deliveries of a pull that began at this wall time."""
        self._received(topic, group, deliveries=len(deliveries))
        self.tracing.received(topic, group, deliveries=deliveries, started_at_ns=started_at_ns)

    def handling(self, delivery: Delivery, *, group: str) -> AbstractContextManager[HandlingAttempt]:
        """Wraps a handler; the caller sets `outcome` and `error` of the yielded value."""
        return _AroundHandler(self, delivery, group)

    def settling(
        self, settlement: Settlement, deliveries: Sequence[Delivery], *, group: str
    ) -> AbstractContextManager[None]:
        """Wraps an ack or nack."""
        return self.tracing.settling(settlement, deliveries, group=group)


def _log_errors(report: Callable[P, None]) -> Callable[P, None]:
    """Wraps a report so that an error of the metrics fails neither a commit nor an ack; it is logged once."""
    if getattr(report, "__self__", None) is NO_METRICS:
        return report
    failed: list[bool] = []

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            report(*args, **kwargs)
        except Exception:  # the boundary to the application's metrics
            if not failed:
                failed.append(True)
                logger.exception("telemetry_failed")

    return guarded


class _AroundHandler:
    """Telemetry.handling: a class, since it is entered for every message and a generator costs three times as much."""

    __slots__ = ("_delivery", "_group", "_handling", "_span", "_started", "_telemetry")

    def __init__(self, telemetry: Telemetry, delivery: Delivery, group: str) -> None:
        self._telemetry = telemetry
        self._delivery = delivery
        self._group = group
        self._handling = HandlingAttempt()
        self._started = 0.0
        self._span = telemetry.tracing.handling(delivery, self._handling, group=group)

    def __enter__(self) -> HandlingAttempt:
        self._started = time.perf_counter()
        self._span.__enter__()
        return self._handling

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._span.__exit__(kind, error, trace)
        finally:
            seconds = time.perf_counter() - self._started
            self._telemetry.handled(self._delivery, self._handling, group=self._group, seconds=seconds)


NO_TELEMETRY = Telemetry(tracing=NO_TRACING)


@lru_cache(maxsize=1)
def default_telemetry() -> Telemetry:
    """Returns the default: OpenTelemetry's spans if its API is installed, and no metrics."""
    return Telemetry()


def trace_context() -> Mapping[str, str]:
    """Returns the current span's `trace_id` and `span_id` for logs; empty without a span or without OpenTelemetry."""
    return _installed_context()()


@lru_cache(maxsize=1)
def _installed_context() -> Callable[[], Mapping[str, str]]:
    try:
        from outbox.telemetry.tracing import current_ids
    except ModuleNotFoundError:
        return dict
    return current_ids


@lru_cache(maxsize=1)
def _installed_tracing() -> Tracing:
    try:
        from outbox.telemetry.tracing import OpenTelemetryTracing
    except ModuleNotFoundError:
        return NO_TRACING
    return OpenTelemetryTracing()
