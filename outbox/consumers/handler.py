"""Consumer: calls a handler for one delivery, with its effect and the inbox mark in one transaction. No threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncContextDecorator, ContextDecorator, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from inspect import isasyncgenfunction, isawaitable, iscoroutinefunction, isgeneratorfunction, signature
from math import ceil
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.consumers.group_declaration import GroupOptions
from outbox.consumers.inbox_table import InboxStore
from outbox.producer.engine_hooks import (
    ending_statement,
    forget_mark,
    is_over,
    keep_mark,
    refuse_autocommit,
    refuse_if_rolled_back,
)
from outbox.store.database import is_conflict, translate
from outbox_core.common.errors import ConfigurationError, NoTransaction, OutboxError, utf8_text
from outbox_core.messages.broadcast_port import Start
from outbox_core.messages.limits import DELAY_MAX_MS, REASON_CHARS_MAX
from outbox_core.messages.message import Delivery

GROUP_ERRORS_MAX: Final = 10
"""The limit of the inner errors that the reason of a group of errors names."""


class RetryLater(Exception):
    """Raised by a handler: nack this message, and redeliver it after `delay_ms` (it uses up an attempt)."""

    def __init__(self, *, delay_ms: float, reason: str = "handler asked for a retry") -> None:
        """`delay_ms` may be a float, as of `timedelta.total_seconds() * 1000`; it is rounded up."""
        if not 0 <= delay_ms <= DELAY_MAX_MS:
            raise ConfigurationError(f"delay_ms must be from 0 to {DELAY_MAX_MS:,}, not {delay_ms:,}")
        super().__init__(reason)
        self.delay_ms: int = ceil(delay_ms)


class NotTried(OutboxError):
    """The inbox's database failed before the handler was called: the message keeps its attempts.

    The cause tells whether a retry can help. `conflict`: it lost against another transaction, most likely a
    duplicate's, and the database is available.
    """

    retryable = True

    def __init__(self, message: str, *, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class CommittedByHandler(OutboxError):
    """The handler committed its session and then failed: its mark is committed too, so the message counts as handled,
    even if the handler's work is incomplete. The cause is the handler's error.
    """

    retryable = False


class Outcome(StrEnum):
    """The outcome of handling one delivery."""

    HANDLED = "handled"
    DEDUPLICATED = "deduplicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A handler and the topics that it consumes.

    With an inbox the handler is called as handler(session, delivery), else as handler(delivery). An `async def` handler
    gets an AsyncSession, and its inbox is on an AsyncEngine.
    """

    topics: tuple[str, ...]
    group: str
    handler: Callable[..., object]
    engine: Engine | None
    async_engine: AsyncEngine | None
    store: InboxStore | None
    workers: int
    prefetch: int
    invisible_ms: int
    handle_ms_max: int
    is_async: bool
    broadcast: Start | None = None
    """Where a broadcast consumer begins, which gets every message of its topics; None: a consumer of its group."""
    options: GroupOptions = field(default_factory=GroupOptions)
    """What it says of its group, which is declared so if it is not there."""
    closes_engine: bool = False
    """Whether its engine was made of a URL for this consumer, so that the end of its runner closes its connections."""

    @property
    def topic(self) -> str:
        """Returns the topic; of several, the first."""
        return self.topics[0]

    def handle(self, delivery: Delivery) -> Outcome:
        """Handle one delivery; an error of the handler is re-raised.

        With an inbox the handler's effect and the mark commit together: a handled message is not handled again, however
        often it is delivered. Raises NotTried if the inbox's database fails before the handler is called,
        CommittedByHandler if the handler has committed its session, and the mark with it, before it failed, and
        NoTransaction if it returned although its session was rolled back or closed, or its transaction ended out of the
        session's sight, as by a procedure.
        """
        if self.is_async:
            raise ConfigurationError(f"{self.handler} is async: await handle_async(delivery)")
        if self.engine is None or self.store is None:
            call_handler(self.handler, delivery)
            return Outcome.HANDLED
        was_ended = False
        try:
            with Session(self.engine) as session, session.begin():
                with not_tried(self.engine):
                    connection = session.connection()
                    is_new = self._mark(connection, delivery)
                if not is_new:
                    return Outcome.DEDUPLICATED
                begun = connection.get_transaction()
                try:
                    call_handler(self.handler, session, delivery)
                finally:
                    was_ended = is_over(connection, begun)
                self._refuse_if_undone(connection, delivery)
        except BaseException as error:
            if was_ended and self._is_marked(self.engine, delivery):
                raise _committed_by_handler(error) from error
            raise
        if was_ended and not self._is_marked(self.engine, delivery):
            raise NoTransaction(ENDED_BY_HANDLER)
        return Outcome.HANDLED

    async def handle_async(self, delivery: Delivery) -> Outcome:
        """The same as handle() for an `async def` handler."""
        if self.async_engine is None:
            await await_handler(self.handler, delivery)
            return Outcome.HANDLED
        was_ended = False
        try:
            async with AsyncSession(self.async_engine) as session, session.begin():
                with not_tried(self.async_engine.sync_engine):
                    connection = await session.connection()
                    is_new = await connection.run_sync(self._mark, delivery)
                if not is_new:
                    return Outcome.DEDUPLICATED
                begun = await connection.run_sync(Connection.get_transaction)
                try:
                    await await_handler(self.handler, session, delivery)
                finally:
                    was_ended = await connection.run_sync(is_over, begun)
                await connection.run_sync(self._refuse_if_undone, delivery)
        except BaseException as error:
            if was_ended and await self._is_marked_async(self.async_engine, delivery):
                raise _committed_by_handler(error) from error
            raise
        if was_ended and not await self._is_marked_async(self.async_engine, delivery):
            raise NoTransaction(ENDED_BY_HANDLER)
        return Outcome.HANDLED

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Calls the undecorated handler, for tests."""
        return self.handler(*args, **kwargs)

    def _mark(self, connection: Connection, delivery: Delivery) -> bool:
        if self.store is None:
            return True
        refuse_autocommit(connection, "effect and mark would not commit together")
        is_new = self.store.mark(connection, group=self.group, message_id=delivery.id, topic=delivery.topic)
        keep_mark(connection)
        return is_new

    def _refuse_if_undone(self, connection: Connection, delivery: Delivery) -> None:
        """Raise an error if the mark was rolled back below the session, by the server or by a statement: part of the
        effect was too, and what followed must not be committed.
        """
        refuse_if_rolled_back(connection)
        words = ending_statement(connection)
        if words is None:
            return
        refuse_autocommit(connection, "effect and mark do not commit together")
        if not self._has_mark(connection, delivery):
            raise NoTransaction(f"{words} ended this transaction: {ENDED_BY_HANDLER}")
        forget_mark(connection)

    def _is_marked(self, engine: Engine, delivery: Delivery) -> bool:
        """Returns whether the mark is committed; False if the inbox cannot be read."""
        try:
            with engine.connect() as connection:
                return self._has_mark(connection, delivery)
        except (DBAPIError, PoolTimeoutError):
            return False

    async def _is_marked_async(self, engine: AsyncEngine, delivery: Delivery) -> bool:
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(self._has_mark, delivery)
        except (DBAPIError, PoolTimeoutError):
            return False

    def _has_mark(self, connection: Connection, delivery: Delivery) -> bool:
        return self.store is not None and self.store.handled(
            connection, group=self.group, message_id=delivery.id, topic=delivery.topic
        )


ENDED_BY_HANDLER: Final = (
    "the handler returned, but its session was rolled back or closed: neither its effect nor its mark is committed, so "
    "the message is not acknowledged; leave the session to the consumer, and raise an error to give the message back"
)


def _committed_by_handler(error: BaseException) -> CommittedByHandler:
    return CommittedByHandler(
        f"the handler committed its session and then failed ({reason_for(error)}): the message counts as handled from "
        "now on, so see to what is missing; leave the commit to the consumer: flush(), or begin_nested()"
    )


@contextmanager
def not_tried(engine: Engine) -> Iterator[None]:
    """Raise NotTried for database errors inside the block, where the handler has not been called."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        conflict = isinstance(error, DBAPIError) and is_conflict(error)
        raise NotTried(str(translate(error, engine.url)), conflict=conflict) from error
    except ConfigurationError as error:
        raise NotTried(str(error)) from error


def call_handler(handler: Callable[..., object], *arguments: object) -> None:
    """Call a plain handler; raise an error if its body has not run to its end when it returns."""
    try:
        refuse_unfinished(handler(*arguments))
    except NotTried as error:
        raise _tried(error) from error


async def await_handler(handler: Callable[..., object], *arguments: object) -> None:
    """The same for a handler that is awaited: what it has returned is looked at after the await."""
    try:
        result = handler(*arguments)
        refuse_unfinished((await result) if isawaitable(result) else result)
    except NotTried as error:
        raise _tried(error) from error


def refuse_unfinished(result: object) -> None:
    """Raise an error if a handler returned work that has yet to run, as a coroutine that nobody awaits: to acknowledge
    its message would lose it. The work is closed or cancelled, and never runs.
    """
    if result is None:
        return
    # A function under @contextmanager returns its generator in an object that nobody enters.
    is_entered_later = isinstance(result, ContextDecorator | AsyncContextDecorator)
    work = getattr(result, "gen", None) if is_entered_later else result
    if not (isawaitable(work) or inspect.isgenerator(work) or inspect.isasyncgen(work) or isinstance(work, Future)):
        return
    end = getattr(work, "close", None) or getattr(work, "cancel", None)
    if end is not None:  # an async generator has neither: it has not begun, and is forgotten
        end()
    raise ConfigurationError(
        f"the handler returned a {type(result).__name__}, an awaitable, generator or future that nobody awaits or runs:"
        " its work is not done, so the message is not acknowledged; do it in the handler, and await in an `async def`"
    )


def _tried(error: NotTried) -> OutboxError:
    """Returns the failure for a NotTried that the handler itself raised, as one can that calls another consumer's
    handle(): its message was tried, and would come again for ever without using up an attempt.
    """
    return OutboxError(f"the handler raised {reason_for(error)}")


def is_async(handler: Callable[..., object]) -> bool:
    """Returns whether a handler must be awaited: `async def`, also below a partial or as an object's __call__."""
    return iscoroutinefunction(handler) or iscoroutinefunction(_called_function(handler))


def refuse_generator(handler: Callable[..., object]) -> None:
    """Raise ConfigurationError for a handler whose call would run nothing of it: a generator, also below a partial, as
    an object's __call__ or under @contextmanager.
    """
    called = _called_function(handler)
    if getattr(called, "__globals__", {}).get("__name__") == "contextlib":  # the only wrapper known to run nothing
        called = inspect.unwrap(called)
    name = handler_name(handler)
    if isgeneratorfunction(called) or isasyncgenfunction(called):
        raise ConfigurationError(f"the handler {name} is a generator: calling it would run nothing of it")


def handler_name(handler: Callable[..., object]) -> str:
    """Returns the name of a handler for texts of errors."""
    return str(getattr(handler, "__qualname__", repr(handler)))


def _called_function(handler: Callable[..., object]) -> Callable[..., object]:
    """Returns what a call runs: of a partial the function that it completes, of an object its class's __call__."""
    while isinstance(handler, partial):
        handler = handler.func
    return handler if inspect.isroutine(handler) else type(handler).__call__


def check_handler(handler: Callable[..., object], engine: Engine | None) -> None:
    """Raise ConfigurationError for a handler that does not fit its inbox, or whose body would never run."""
    name = handler_name(handler)
    if isinstance(handler, Consumer):
        raise ConfigurationError(
            f"the handler {handler_name(handler.handler)} is a consumer already, of {', '.join(handler.topics)}, which "
            "would be consumed no more: name all topics in one @consumer, or decorate the function itself again"
        )
    if isinstance(handler, type) or not callable(handler):
        raise ConfigurationError(
            f"the handler {name} is no function: decorate a function, a method or a callable object"
        )
    refuse_generator(handler)
    if engine is not None and is_async(handler) and not engine.dialect.is_async:
        raise ConfigurationError(
            f"the handler {name} is async, its inbox is not: use an AsyncEngine (create_async_engine)"
        )
    if engine is not None and not is_async(handler) and engine.dialect.is_async:
        raise ConfigurationError(
            f"the inbox of the handler {name} is on an async engine, and what is called is no `async def`, perhaps "
            "because of a decorator: write `async def`, or use a plain engine"
        )
    _check_parameters(handler, name, with_session=engine is not None)


def _check_parameters(handler: Callable[..., object], name: str, *, with_session: bool) -> None:
    """Rejects a handler with wrong parameters, which would fail at every delivery until all were dead letters."""
    arguments = ("session", "delivery") if with_session else ("delivery",)
    try:
        signature(handler).bind(*arguments)
    except TypeError as error:
        because = "with an inbox" if with_session else "without an inbox"
        raise ConfigurationError(
            f"the handler {name} is called as {name}({', '.join(arguments)}) {because}: {error}"
        ) from error
    except ValueError:  # a built-in without a signature
        return


def reason_for(error: BaseException) -> str:
    """Returns the reason of a failure for logs and the broker: short, without the parameters of statements, and text
    that can be written as UTF-8. Never raises.
    """
    if isinstance(error, RetryLater):
        return _text(error)[:REASON_CHARS_MAX]
    # The own text of an error of SQLAlchemy's lists the parameters.
    text = _text(error.orig).partition("\n")[0] if isinstance(error, StatementError) else _text(error)
    reason = f"{type(error).__name__}: {text}"
    if isinstance(error, BaseExceptionGroup):  # as of a task group: its own text says only how many there are
        reason = f"{reason}: {'; '.join(reason_for(inner) for inner in _inner_errors(error))}"
    return reason[:REASON_CHARS_MAX]


def _inner_errors(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Returns the first errors of a group and of the groups in it."""
    waiting: list[BaseException] = [group]
    inner_errors: list[BaseException] = []
    while waiting and len(inner_errors) < GROUP_ERRORS_MAX:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting = [*error.exceptions[:GROUP_ERRORS_MAX], *waiting]
        else:
            inner_errors.append(error)
    return inner_errors


def _text(error: object) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the boundary to the user's code: an error whose text cannot be made
        text = "an error without a text"
    return utf8_text(text)
