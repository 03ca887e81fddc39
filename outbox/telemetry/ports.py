"""The ports Metrics and Tracing, and the values that they receive.

An implementation must neither slow down nor fail the code that it observes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from outbox.store.row import OutboxRow
from outbox_core.messages.message import Delivery, Message, PublishResult


class SendPath(StrEnum):
    """The origin of a send: the sender right after the commit, or the compensator."""

    INLINE = "inline"
    COMPENSATOR = "compensator"


class Settlement(StrEnum):
    """How deliveries are settled."""

    ACK = "ack"
    NACK = "nack"


@dataclass(slots=True)
class SendAttempt:
    """A batch that is sent to the broker by `path`. The relay sets `results`; `error` is what publish() raised."""

    path: SendPath
    results: Sequence[PublishResult] = ()
    error: BaseException | None = None


@dataclass(slots=True)
class HandlingAttempt:
    """A delivery that a handler processes. The consumer sets `outcome`, one of a small set."""

    outcome: str = ""
    error: BaseException | None = None


class Metrics(Protocol):
    """Counters and durations. Called from any thread; must not block, and must not raise."""

    def committed(self, rows: Sequence[OutboxRow]) -> None:
        """A business transaction has committed these rows."""

    def dropped(self, rows: int) -> None:
        """The sender left this many rows to the compensator: its queue was full, or their lease was ending."""

    def watch_queue(self, length: Callable[[], int]) -> None:
        """`length` returns the current number of rows in a sender's queue."""

    def sent(self, messages: Sequence[Message], sending: SendAttempt, *, path: SendPath, seconds: float) -> None:
        """A request with a batch has ended, with or without a response of the broker."""

    def received(self, topic: str, group: str, *, deliveries: int) -> None:
        """A pull has returned this many deliveries."""

    def handled(self, delivery: Delivery, handling: HandlingAttempt, *, group: str, seconds: float) -> None:
        """A handler has finished a delivery, successfully or not."""

    def counted(self, event: str, topic: str, group: str, *, by: int = 1) -> None:
        """Another event of a consumer; `event` is one of a small set."""


class Tracing(Protocol):
    """Spans. Called from any thread; must not block, and must not raise anything of its own."""

    def stamp(self, headers: dict[str, str], *, topic: str, message_id: str) -> None:
        """A message is made in the caller's trace: add the headers that propagate the trace."""

    def sending(self, messages: Sequence[Message], sending: SendAttempt) -> AbstractContextManager[None]:
        """Wraps the send of a batch to the broker."""

    def received(self, topic: str, group: str, *, deliveries: Sequence[Delivery], started_at_ns: int) -> None:
        """A pull that began at this wall time has returned deliveries."""

    def handling(self, delivery: Delivery, handling: HandlingAttempt, *, group: str) -> AbstractContextManager[None]:
        """Wraps a handler, inside which the span is the current one."""

    def settling(
        self, settlement: Settlement, deliveries: Sequence[Delivery], *, group: str
    ) -> AbstractContextManager[None]:
        """Wraps an ack or nack."""


class _NoMetrics:
    """Counts nothing."""

    def committed(self, rows: Sequence[OutboxRow]) -> None: ...
    def dropped(self, rows: int) -> None: ...
    def watch_queue(self, length: Callable[[], int]) -> None: ...
    def sent(self, messages: Sequence[Message], sending: SendAttempt, *, path: SendPath, seconds: float) -> None: ...
    def received(self, topic: str, group: str, *, deliveries: int) -> None: ...
    def handled(self, delivery: Delivery, handling: HandlingAttempt, *, group: str, seconds: float) -> None: ...
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
