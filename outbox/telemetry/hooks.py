"""Where the code tells what it does: the ports Metrics and Tracing, and Telemetry, which speaks to both. No library.

Box, sender, relay and consumers hold one Telemetry and call it at named places; whoever wants to know implements one
of the two ports. Neither may slow down or fail what it watches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import TracebackType
from typing import ParamSpec, Protocol

from messaging.message import Delivery, Message, PublishResult
from outbox.row import OutboxRow

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class SendPath(StrEnum):
    """Who sends: the sender right after the commit, or the compensator."""

    INLINE = "inline"
    COMPENSATOR = "compensator"


class Settlement(StrEnum):
    """How deliveries are settled."""

    ACK = "ack"
    NACK = "nack"


@dataclass(slots=True)
class Sending:
    """One batch on its way to the broker, sent by `path`. The relay writes `results` down; `error` is what publish
    raised.
    """

    path: SendPath
    results: Sequence[PublishResult] = ()
    error: BaseException | None = None


@dataclass(slots=True)
class Handling:
    """One delivery in a handler's hands. The consumer writes `outcome` down, a word of a small set."""

    outcome: str = ""
    error: BaseException | None = None


class Metrics(Protocol):
    """Counts and times. Called from any thread; must not block, and must not raise."""

    def committed(self, rows: Sequence[OutboxRow]) -> None:
        """A business transaction has committed these rows."""

    def dropped(self, rows: int) -> None:
        """The sender gave so many rows up to the compensator: its queue was full, or their lease was ending."""

    def watch_queue(self, length: Callable[[], int]) -> None:
        """`length` tells, whenever asked, how many rows wait in a sender's queue."""

    def sent(self, messages: Sequence[Message], sending: Sending, *, path: SendPath, seconds: float) -> None:
        """The broker has answered one batch, or has not."""

    def received(self, topic: str, group: str, *, deliveries: int) -> None:
        """A pull has brought so many deliveries."""

    def handled(self, delivery: Delivery, handling: Handling, *, group: str, seconds: float) -> None:
        """A handler is done with a delivery, well or not."""

    def counted(self, event: str, topic: str, group: str, *, by: int = 1) -> None:
        """Something else happened in a consumer; `event` is a word of a small set."""


class Tracing(Protocol):
    """Spans. Called from any thread; must not block, and must not raise anything of its own."""

    def stamp(self, headers: dict[str, str], *, topic: str, message_id: str) -> None:
        """A message is made in the caller's trace: add to its headers what takes the trace along."""

    def sending(self, messages: Sequence[Message], sending: Sending) -> AbstractContextManager[None]:
        """Around one batch to the broker."""

    def received(self, topic: str, group: str, *, deliveries: Sequence[Delivery], started_at_ns: int) -> None:
        """A pull that began at this wall time has brought something."""

    def handling(self, delivery: Delivery, handling: Handling, *, group: str) -> AbstractContextManager[None]:
        """Around a handler; what it calls sees the span as the current one."""

    def settling(
        self, settlement: Settlement, deliveries: Sequence[Delivery], *, group: str
    ) -> AbstractContextManager[None]:
        """Around an ack or nack."""


class _NoMetrics:
    """Counts nothing."""

    def committed(self, rows: Sequence[OutboxRow]) -> None: ...
    def dropped(self, rows: int) -> None: ...
    def watch_queue(self, length: Callable[[], int]) -> None: ...
    def sent(self, messages: Sequence[Message], sending: Sending, *, path: SendPath, seconds: float) -> None: ...
    def received(self, topic: str, group: str, *, deliveries: int) -> None: ...
    def handled(self, delivery: Delivery, handling: Handling, *, group: str, seconds: float) -> None: ...
    def counted(self, event: str, topic: str, group: str, *, by: int = 1) -> None: ...


class _NoTracing:
    """Makes no span."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def stamp(self, headers: dict[str, str], *, topic: str, message_id: str) -> None: ...
    def received(self, topic: str, group: str, *, deliveries: Sequence[Delivery], started_at_ns: int) -> None: ...

    def sending(self, *_: object) -> AbstractContextManager[None]:
        return self._nothing

    def handling(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return self._nothing

    def settling(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return self._nothing


NO_METRICS: Metrics = _NoMetrics()
NO_TRACING: Tracing = _NoTracing()


class Telemetry:
    """What box, sender, relay and consumers speak to.

    `metrics`: e.g. outbox.telemetry.metrics.OutboxMetrics(); None counts nothing. `tracing`: None follows
    OpenTelemetry's global tracer provider where opentelemetry-api is installed; NO_TRACING makes no spans.
    """

    def __init__(self, *, metrics: Metrics | None = None, tracing: Tracing | None = None) -> None:
        self.metrics = metrics if metrics is not None else NO_METRICS
        self.tracing = tracing if tracing is not None else _installed_tracing()
        self.stamp = self.tracing.stamp  # bare: OpenTelemetry's API does not raise, and publish() has to be cheap
        self.committed = _harmless(self.metrics.committed)
        self.watch_queue = _harmless(self.metrics.watch_queue)
        self.dropped = _harmless(self.metrics.dropped)
        self.counted = _harmless(self.metrics.counted)
        self._sent = _harmless(self.metrics.sent)
        self._received = _harmless(self.metrics.received)
        self.handled = _harmless(self.metrics.handled)

    @contextmanager
    def sending(self, messages: Sequence[Message], *, path: SendPath) -> Iterator[Sending]:
        """Around broker.publish(messages); write what it returned to `results` of what this yields."""
        sending = Sending(path=path)
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
        """A pull, begun at this wall time, has brought these."""
        self._received(topic, group, deliveries=len(deliveries))
        self.tracing.received(topic, group, deliveries=deliveries, started_at_ns=started_at_ns)

    def handling(self, delivery: Delivery, *, group: str) -> AbstractContextManager[Handling]:
        """Around a handler; write what it came to, to `outcome` and `error` of what this yields."""
        return _AroundHandler(self, delivery, group)

    def settling(
        self, settlement: Settlement, deliveries: Sequence[Delivery], *, group: str
    ) -> AbstractContextManager[None]:
        """Around an ack or nack."""
        return self.tracing.settling(settlement, deliveries, group=group)


def _harmless(tell: Callable[P, None]) -> Callable[P, None]:
    """The same, but that an error of whoever is told fails nothing, neither commit nor ack; it is logged once."""
    if getattr(tell, "__self__", None) is NO_METRICS:
        return tell
    failed: list[bool] = []

    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            tell(*args, **kwargs)
        except Exception:  # the boundary to whatever was given as metrics
            if not failed:
                failed.append(True)
                logger.exception("telemetry_failed")

    return told


class _AroundHandler:
    """Telemetry.handling: a class, since it is entered for every message and a generator costs thrice as much."""

    __slots__ = ("_delivery", "_group", "_handling", "_span", "_started", "_telemetry")

    def __init__(self, telemetry: Telemetry, delivery: Delivery, group: str) -> None:
        self._telemetry = telemetry
        self._delivery = delivery
        self._group = group
        self._handling = Handling()
        self._started = 0.0
        self._span = telemetry.tracing.handling(delivery, self._handling, group=group)

    def __enter__(self) -> Handling:
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
    """What is used where nothing was given: OpenTelemetry's spans where its API is installed, and no metrics."""
    return Telemetry()


def trace_context() -> Mapping[str, str]:
    """The current span's `trace_id` and `span_id`, for logs; empty where there is none, or no OpenTelemetry."""
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
