"""The broker inside this process: `embedded:./folder`. One data folder belongs to one process at a time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.dead_letter_operations import EditOperation
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import Storage
from outbox_core.common.clock import Clock
from outbox_core.common.errors import BrokerRefused, ConfigurationError
from outbox_core.messages.broadcast_port import Start, TopicRead
from outbox_core.messages.broker_port import BrokerAdmin
from outbox_core.messages.ids import new_message_id
from outbox_core.messages.limits import INVISIBLE_MS_DEFAULT
from outbox_core.messages.message import (
    AckStatus,
    CancelStatus,
    DeadCount,
    DeadEdit,
    DeadFilter,
    DeadLetter,
    Delivery,
    EditResult,
    ExtendStatus,
    GroupConfig,
    Message,
    NackStatus,
    PublishResult,
)
from outbox_core.runtime.process_fork import notice_fork, reset_in_children

SCHEME: Final = "embedded:"
T = TypeVar("T")
_ACTOR: Final = "embedded"
"""Who acts, in the broker's log: this process, without a token."""


class EngineBroker(ABC):
    """The Broker's port over an engine of this process. Which engine that is says the class below it."""

    @abstractmethod
    def _open(self) -> Engine:
        """Returns the engine, opened where it is not."""

    def _ask(self, call: Callable[[Engine], T]) -> T:
        return call(self._open())

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        """Store a batch, as durably as the engine's options say."""
        return self._ask(lambda engine: engine.publisher.publish(batch))

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
            lambda engine: engine.puller.pull(
                topic, group, max_messages=max_messages, wait_ms=wait_ms, invisible_ms=invisible_ms, begins=begins
            )
        )

    def read(
        self, topic: str, *, offset: int | None = None, start: Start = "latest", max_messages: int = 100,
        wait_ms: int = 0,
    ) -> TopicRead:  # fmt: skip
        """Read a topic on, without a group."""
        return self._ask(
            lambda engine: engine.reader.read(
                topic, offset=offset, start=start, max_messages=max_messages, wait_ms=wait_ms
            )
        )

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        """Settle deliveries."""
        return self._ask(lambda engine: engine.settler.ack(receipts))

    def nack(
        self, receipts: Sequence[str], *, delay_ms: int | None = None, reason: str | None = None, counts: bool = True
    ) -> list[NackStatus]:
        """Give deliveries back."""
        return self._ask(lambda engine: engine.settler.nack(receipts, delay_ms=delay_ms, reason=reason, counts=counts))

    def extend(self, receipts: Sequence[str], *, invisible_ms: int, begun: bool = False) -> list[ExtendStatus]:
        """Keep deliveries invisible."""
        return self._ask(lambda engine: engine.settler.extend(receipts, invisible_ms=invisible_ms, begun=begun))

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        """Cancel scheduled messages, on all topics."""
        return self._ask(lambda engine: engine.publisher.cancel(message_ids))

    @property
    def admin(self) -> BrokerAdmin:
        """The operator's half."""
        self._open()
        return EmbeddedAdmin(self._open)


class EmbeddedBroker(EngineBroker):
    """A Broker over an engine of this process; opened on first use, shared by all who name the same folder.

    After a fork the child has no engine: the folder stays the parent's, and using it in the child raises
    ConfigurationError. Where several processes publish, run `outbox broker serve` instead. Thread-safe and fork-safe.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        options: EngineOptions | None = None,
        storage: Storage | None = None,
    ) -> None:
        """`url` is `embedded:FOLDER`; the folder is made where it is missing. `clock`, `options` and `storage` are
        those of the first that opens the folder. Does no I/O.
        """
        path = unquote(url.removeprefix(SCHEME).removeprefix("//"))
        if not url.startswith(SCHEME) or not path:
            raise ConfigurationError(
                f"an embedded broker's URL names a folder, like embedded:./broker-data, not {url!r}"
            )
        self._folder = Path(path)
        self._clock = clock
        self._options = options
        self._storage = storage
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._watches_forks = False
        self._closed = False

    def close(self) -> None:
        """Let go of the engine; the last one that shares it closes it. Idempotent."""
        notice_fork()
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            _shared.release(engine)

    def reset_after_fork(self) -> None:
        """Leave the engine to the parent in a forked child: opening the folder there meets the parent's lock."""
        self._lock = threading.Lock()
        self._engine = None

    def _open(self) -> Engine:
        notice_fork()
        with self._lock:
            if self._closed:
                raise ConfigurationError("this broker was closed; connect again")
            if not self._watches_forks:
                reset_in_children(self)
                self._watches_forks = True
            if self._engine is None:
                self._engine = _shared.acquire(
                    self._folder, clock=self._clock, options=self._options, storage=self._storage
                )
            return self._engine


class EmbeddedAdmin:
    """BrokerAdmin over an engine. Unknown topics and groups are refused."""

    def __init__(self, opened: Callable[[], Engine]) -> None:
        """`opened` returns the engine of this process, which after a fork is not the one that there was before."""
        self._opened = opened

    def declare_group(self, topic: str, group: str, config: GroupConfig) -> None:
        """Make a group or change its settings."""
        self._opened().admin.declare_group(topic, group, config)

    def group_config(self, topic: str, group: str) -> GroupConfig | None:
        """The settings of a group that is there."""
        try:
            return self._opened().admin.group_config(topic, group)
        except KeyError:
            return None

    def topics(self) -> list[str]:
        """All topics."""
        return self._opened().admin.topics()

    def figures(self, topic: str, group: str | None = None) -> Mapping[str, int]:
        """Counts of a topic or group."""
        with _unknown_is_refused():
            if group is None:
                return self._opened().admin.topic_figures(topic)
            return self._opened().admin.group_figures(topic, group)

    def delete_group(self, topic: str, group: str, *, force: bool = False) -> None:
        """Delete a group. Raises InUse, unless forced."""
        with _unknown_is_refused():
            self._opened().deletion.delete_group(topic, group, force=force)

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic. Raises InUse, unless forced."""
        with _unknown_is_refused():
            self._opened().deletion.delete_topic(topic, force=force)

    def seek(self, topic: str, group: str, *, to_ms: int | None = None, to_offset: int | None = None) -> None:
        """Move a group."""
        with _unknown_is_refused():
            self._opened().admin.seek(topic, group, to_ms=to_ms, to_offset=to_offset)

    def pause(self, topic: str, group: str, *, paused: bool) -> None:
        """Pause or resume deliveries."""
        with _unknown_is_refused():
            self._opened().admin.pause(topic, group, paused=paused)

    def dead(
        self, topic: str, group: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[list[DeadLetter], str | None]:
        """One page of dead letters."""
        with _unknown_is_refused():
            return self._opened().admin.dead(topic, group, limit=limit, after=after)

    def redrive(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, per_second: int | None = None
    ) -> int:
        """Send dead letters again."""
        with _unknown_is_refused():
            return self._opened().dead_letters.redrive(topic, group, ids=ids, per_second=per_second)

    def stop_redrive(self, topic: str, group: str) -> int:
        """Stop the redrives of a group."""
        with _unknown_is_refused():
            return self._opened().dead_letters.stop_redrive(topic, group, by=_ACTOR)

    def count_dead(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None
    ) -> DeadCount:
        """How many dead letters are meant."""
        with _unknown_is_refused():
            return self._opened().dead_letters.count(topic, group, ids=ids, where=where)

    def discard(
        self, topic: str, group: str, *, ids: Sequence[str] | None = None, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str,
    ) -> int:  # fmt: skip
        """Discard dead letters for good."""
        with _unknown_is_refused():
            return self._opened().dead_letters.discard(
                topic, group, ids=ids, where=where, dead_before_ms=dead_before_ms, by=_ACTOR, why=why
            )

    def edit(
        self, topic: str, group: str, edits: Mapping[str, DeadEdit], *, why: str, operation: str | None = None
    ) -> list[EditResult]:
        """Edit dead letters by their ids."""
        named = EditOperation(name=operation or new_message_id(), by=_ACTOR, why=why)
        with _unknown_is_refused():
            return self._opened().dead_letters.edit(topic, group, edits, operation=named)

    def edit_many(
        self, topic: str, group: str, edit: DeadEdit, *, where: DeadFilter | None = None,
        dead_before_ms: int | None = None, why: str, operation: str | None = None,
    ) -> Iterator[EditResult]:  # fmt: skip
        """Edit dead letters in one way."""
        named = EditOperation(name=operation or new_message_id(), by=_ACTOR, why=why)
        after: int | None = 0
        while after is not None:
            with _unknown_is_refused():
                page = self._opened().dead_letters.edit_page(
                    topic, group, edit, where=where, dead_before_ms=dead_before_ms, after=after, operation=named
                )
            yield from page.results
            after = page.next


class _unknown_is_refused:  # noqa: N801 - reads as the statement that it is
    """Translates an unknown topic or group to the port's error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, KeyError):
            raise BrokerRefused(str(error.args[0])) from error


class _SharedEngines:
    """The engines of this process by folder, counted. In a forked child none: those that it inherited are copies, whose
    threads are gone and whose ideas of the logs' ends go stale.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[Path, tuple[Engine, int]] = {}

    def acquire(
        self, folder: Path, *, clock: Clock | None, options: EngineOptions | None, storage: Storage | None
    ) -> Engine:
        path = folder.resolve()
        with self._lock:
            entry = self._engines.get(path)
            engine = entry[0] if entry else Engine.open(path, clock=clock, options=options, storage=storage)
            self._engines[path] = (engine, entry[1] + 1 if entry else 1)
            return engine

    def release(self, engine: Engine) -> None:
        with self._lock:
            for path, (shared_engine, users) in list(self._engines.items()):
                if shared_engine is not engine:
                    continue
                if users > 1:
                    self._engines[path] = (shared_engine, users - 1)
                else:
                    del self._engines[path]
                    engine.close()

    def reset_after_fork(self) -> None:
        """Leave the engines to the parent, in a forked child."""
        self._lock = threading.Lock()
        self._engines = {}


_shared = _SharedEngines()
reset_in_children(_shared)
