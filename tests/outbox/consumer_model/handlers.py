"""The handlers of a program: of every shape, with the faults that the program has for them, counted at each call."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Backoff, Consumer, Delivery, Outbox, RetryLater, consumer
from tests.outbox.consumer_model.program import (
    ATTEMPTS_MAX,
    CHAINED,
    LARGE_BODY_BYTES,
    TOPIC,
    Fault,
    Group,
    Program,
    Shape,
    chained_id,
)

TABLES = (
    "CREATE TABLE effect (consumer VARCHAR(8), message VARCHAR(8))",
    "CREATE TABLE counter (consumer VARCHAR(8), side VARCHAR(1), value INTEGER, PRIMARY KEY (consumer, side))",
)
SERVER_OPTIONS = ("--innodb-lock-wait-timeout=5",)
"""Of a database's server: a handler that hangs keeps its mark's lock, for which others wait no longer."""
INVISIBLE_MS = 1_000
HANG_SECONDS_MAX = 300
HANG_POLL_SECONDS = 0.005
MEETING_SECONDS_MAX = 0.2
DEADLOCK = 1213


class Interrupted(BaseException):
    """What is no Exception."""


class Calls:
    """Counts what handlers did, and tells each to a listener: `call`, `return` or `deadlock`, group, message."""

    def __init__(self, tell: Callable[[str, str, str], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._tell = tell
        self.counted: dict[str, Counter[tuple[str, str]]] = {what: Counter() for what in ("call", "return", "deadlock")}

    def count(self, what: str, group: str, message_id: str) -> int:
        """Count one; how many there are now."""
        with self._lock:
            self.counted[what][group, message_id] += 1
            count = self.counted[what][group, message_id]
        if self._tell is not None:
            self._tell(what, group, message_id)
        return count

    def of(self, what: str, group: str, message_id: str) -> int:
        """How many there are."""
        return self.counted[what][group, message_id]


class Meeting:
    """Where two handlers that have one row each wait for each other for a moment, before they want the other's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: Counter[tuple[str, str]] = Counter()

    def wait(self, group: str, *, mine: str, other: str) -> None:
        """Wait until another handler has the other row, or a moment."""
        with self._changed:
            self._here[group, mine] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._here[group, other] > 0, MEETING_SECONDS_MAX)
            self._here[group, mine] -= 1


class Handlers:
    """Makes the consumers of a program: each has an engine of its own, and chains messages through one Outbox."""

    def __init__(
        self, plan: Program, *, urls: tuple[str, str], box: Outbox, calls: Calls, may_end: threading.Event,
        meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        """`urls`: of the inbox for plain handlers and for async ones. `may_end` frees what hangs. `meeting`: where
        handlers in threads can deadlock.
        """
        self._plan = plan
        self._urls = urls
        self._box = box
        self._calls = calls
        self._may_end = may_end
        self._meeting = meeting

    def consumers(self) -> list[Consumer]:
        """One for each group."""
        return [self._consumer(group) for group in self._plan.groups]

    def _consumer(self, group: Group) -> Consumer:
        decorate = consumer(
            TOPIC, group=group.name, inbox=self._urls[group.is_async] if group.has_inbox else None,
            ordered=group.ordered, max_attempts=ATTEMPTS_MAX, workers=group.workers, filter=group.filter, prefetch=5,
            invisible_ms=INVISIBLE_MS, backoff=Backoff(initial_ms=1, max_ms=5),
        )  # fmt: skip
        return decorate(shaped(group, self._handler(group)))

    def _handler(self, group: Group) -> Callable[..., Any]:
        """A handler of a group: its effect is a row, and with an inbox a chained message too."""

        def with_inbox(session: Session, one: Delivery) -> object:
            attempt = self._calls.count("call", group.name, one.id)
            if self._hangs(group, one, attempt):
                self._may_end.wait(HANG_SECONDS_MAX)
            return self._act(session, one, group, attempt)

        def without(one: Delivery) -> object:
            attempt = self._calls.count("call", group.name, one.id)
            if self._hangs(group, one, attempt):
                self._may_end.wait(HANG_SECONDS_MAX)
            return self._fail(group, one, None, attempt)

        async def with_inbox_async(session: AsyncSession, one: Delivery) -> object:
            attempt = self._calls.count("call", group.name, one.id)
            while self._hangs(group, one, attempt):
                await asyncio.sleep(HANG_POLL_SECONDS)
            return await session.run_sync(self._act, one, group, attempt)

        async def without_async(one: Delivery) -> object:
            attempt = self._calls.count("call", group.name, one.id)
            while self._hangs(group, one, attempt):
                await asyncio.sleep(HANG_POLL_SECONDS)
            return self._fail(group, one, None, attempt)

        if group.has_inbox:
            return with_inbox_async if group.is_async else with_inbox
        return without_async if group.is_async else without

    def _hangs(self, group: Group, one: Delivery, attempt: int) -> bool:
        fault, times = self._plan.faults[group.name, one.id]
        return fault is Fault.HANGS and attempt <= times and not self._may_end.is_set()

    def _act(self, session: Session, one: Delivery, group: Group, attempt: int) -> object:
        if (group.name, one.id) in self._plan.crossing:
            self._cross(session, group, one)
        session.execute(text("INSERT INTO effect VALUES (:group, :id)"), {"group": group.name, "id": one.id})
        if (group.name, one.id) in self._plan.chaining:
            body = "x" * (LARGE_BODY_BYTES if (group.name, one.id) in self._plan.large else 1)
            self._box.publish(CHAINED, body, message_id=chained_id(group.name, one.id), session=session)
        return self._fail(group, one, session, attempt)

    def _cross(self, session: Session, group: Group, one: Delivery) -> None:
        """Count on both sides, beginning with one or the other: as a deadlock leaves nothing, both stay equal."""
        first, second = ("a", "b") if int(one.id.removeprefix("m-")) % 4 < 2 else ("b", "a")
        add = text("UPDATE counter SET value = value + 1 WHERE consumer = :group AND side = :side")
        try:
            session.execute(add, {"group": group.name, "side": first})
            if self._meeting is not None and not group.is_async:  # an async one would hold up its loop
                self._meeting.wait(group.name, mine=first, other=second)
            session.execute(add, {"group": group.name, "side": second})
        except OperationalError as error:
            if error.orig is None or error.orig.args[0] != DEADLOCK:
                raise
            self._calls.count("deadlock", group.name, one.id)
            if (group.name, one.id) not in self._plan.swallowing:
                raise

    def _fail(self, group: Group, one: Delivery, session: Session | None, attempt: int) -> object:
        """What the program has for this attempt; returns what the handler returns."""
        _, times = self._plan.faults[group.name, one.id]
        if attempt <= times:
            match self._plan.fault(group, one.id):
                case Fault.RAISES:
                    raise LookupError(one.id)
                case Fault.RETRIES_LATER:
                    raise RetryLater(delay_ms=1, reason="later")
                case Fault.BASE_EXCEPTION:
                    raise Interrupted
                case Fault.EXITS:
                    raise SystemExit(3)
                case Fault.FORGETS_AWAIT:
                    return asyncio.sleep(0)
                case Fault.ROLLS_BACK if session is not None:
                    session.rollback()
                case Fault.COMMITS_AND_RAISES if session is not None:
                    session.commit()
                    raise LookupError(one.id)
                case Fault.COMMITS_AND_EXITS if session is not None:
                    session.commit()
                    raise SystemExit(3)
                case _:
                    pass
        self._calls.count("return", group.name, one.id)
        return None


def shaped(group: Group, handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler in the shape that its group has for it."""
    match group.shape:
        case Shape.FUNCTION:
            return handler
        case Shape.PARTIAL:
            return functools.partial(handler)
        case Shape.OBJECT:
            return AsyncObject(handler) if group.is_async else PlainObject(handler)
        case Shape.DECORATED:
            return decorated_async(handler) if group.is_async else decorated(handler)


class PlainObject:
    """An object that is called."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    def __call__(self, *arguments: Any) -> object:
        return self._handler(*arguments)


class AsyncObject:
    """An object whose call is awaited."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    async def __call__(self, *arguments: Any) -> object:
        return await self._handler(*arguments)


def decorated(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler under a decorator."""

    @functools.wraps(handler)
    def call(*arguments: Any) -> object:
        return handler(*arguments)

    return call


def decorated_async(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler under a decorator that awaits it."""

    @functools.wraps(handler)
    async def call(*arguments: Any) -> object:
        return await handler(*arguments)

    return call
