"""The broker for tests, `memory:`: the engine in this process on a temporary folder, which is removed with it.

It is a RAM disk's folder where there is one with room, and nothing is synced: what it holds ends with the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit
from weakref import finalize

from broker_adapter.embedded import EmbeddedBroker
from broker_adapter.temporary_engine import named_engines
from outbox_broker.common.engine_options import EngineOptions
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerError, BrokerUnavailable, ConfigurationError, StorageFailed
from outbox_core.messages.broadcast_port import Start, TopicRead
from outbox_core.messages.broker_port import BrokerAdmin
from outbox_core.messages.limits import INVISIBLE_MS_DEFAULT
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    Delivery,
    ExtendStatus,
    Message,
    NackStatus,
    PublishResult,
)

SCHEME: Final = "memory"
T = TypeVar("T")


class TemporaryBroker:
    """A Broker for tests. `memory:` is one of its own; `memory://shop` is shared by all in this process that name it,
    until the last of them is closed or garbage.

    Thread-safe. The engine, with its two threads, is opened by the first call. A forked child may not use it
    (ConfigurationError); let processes share `outbox broker serve`.
    """

    def __init__(
        self,
        url: str = "memory:",
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        folder: Path | None = None,
    ) -> None:
        """`options` are `temporary_engine.OPTIONS` unless given; `folder` is where its own folder is made, a RAM disk
        or the folder for temporary files unless given. All are those of the first to name a shared broker. No I/O.
        """
        self._engine = named_engines.acquire(_name_in(url), clock=clock, options=options, parent=folder)
        self._process = os.getpid()
        self._abandoned = finalize(self, named_engines.abandon, self._engine)
        self._abandoned.atexit = False  # at exit all are closed

    # -- the port ----------------------------------------------------------------------------------------------------

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch."""
        return self._ask(lambda broker: broker.publish(batch))

    def pull(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int = 100,
        wait_ms: int = 0,
        invisible_ms: int = INVISIBLE_MS_DEFAULT,
        begins: bool = False,
    ) -> list[Delivery]:
        """Take what is ready, waiting up to `wait_ms` of the broker's clock for the first."""
        return self._ask(
            lambda broker: broker.pull(
                topic, group, max_messages=max_messages, wait_ms=wait_ms, invisible_ms=invisible_ms, begins=begins
            )
        )

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Read a topic on, without a group."""
        return self._ask(
            lambda broker: broker.read(topic, offset=offset, start=start, max_messages=max_messages, wait_ms=wait_ms)
        )

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries."""
        return self._ask(lambda broker: broker.ack(receipts))

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back."""
        return self._ask(lambda broker: broker.nack(receipts, delay_ms=delay_ms, reason=reason, counts=counts))

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible."""
        return self._ask(lambda broker: broker.extend(receipts, invisible_ms=invisible_ms, begun=begun))

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages, on all topics."""
        return self._ask(lambda broker: broker.cancel(message_ids))

    @property
    def admin(self) -> BrokerAdmin:
        """The operator's half; ask for it anew after `clear()` and after an outage."""
        return self._ask(lambda broker: broker.admin)

    def close(self) -> None:
        """Use it no more. The last one that shares the engine ends it and its polls, and removes the folder.
        Idempotent.
        """
        if self._abandoned.detach() and self._process == os.getpid():
            named_engines.release(self._engine)

    # -- for tests ---------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """The clock of the broker."""
        return self._engine.clock

    def clear(self) -> None:
        """Forget all messages, topics, groups and ids; long polls go on."""
        self._refuse_if_unusable()
        self._engine.clear()

    @contextmanager
    def out_of_service(self, error: BrokerError | None = None) -> Iterator[None]:
        """Inside the block every call raises this error, BrokerUnavailable by default, and so do long polls that it
        finds waiting. The engine is closed, and opened again afterwards with all that it had stored.
        """
        self._refuse_if_unusable()
        self._engine.begin_outage(
            error or BrokerUnavailable("the in-memory broker is out of service, as the test asked")
        )
        try:
            yield
        finally:
            self._engine.end_outage()

    # -- the engine --------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[EmbeddedBroker], T]) -> T:
        """The call's answer. One that a clear() ended is made again, of the new engine."""
        while True:
            self._refuse_if_unusable()
            opening = self._engine.opening()
            try:
                return call(opening.broker)
            except (StorageFailed, ConfigurationError):
                if not opening.is_ended:
                    raise
                if opening.outage is not None:
                    raise opening.outage from None

    def _refuse_if_unusable(self) -> None:
        if not self._abandoned.alive:
            raise ConfigurationError("this broker was closed; connect again")
        if self._process != os.getpid():
            raise ConfigurationError(
                "an in-memory broker belongs to the process that connected to it; connect in this one, or let both "
                "share `outbox broker serve`"
            )


def _name_in(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.query or parts.path.strip("/"):
        raise ConfigurationError(f"an in-memory broker's URL is memory: or memory://NAME, not {url!r}")
    return unquote(parts.netloc)
