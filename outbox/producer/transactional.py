"""@box.transactional: opens, joins or nests the transaction of a business function. Publishes nothing itself."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from inspect import Signature, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, assert_never, overload

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outbox_core.common.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox.producer.session_provider import SessionProvider

P = ParamSpec("P")
R = TypeVar("R")

_SESSIONS: Final = (Session, scoped_session, AsyncSession, async_scoped_session)


class Propagation(StrEnum):
    """How a transactional function treats a transaction that is open already.

    required: joins it, or opens one. requires_new: always opens one of its own, on another connection, that commits
    or rolls back independently. nested: a savepoint inside it, or a new transaction if none is open.
    """

    REQUIRED = "required"
    REQUIRES_NEW = "requires_new"
    NESTED = "nested"


class TransactionalFunction(Generic[P, R]):
    """A business function that is called without a session and gets one as its first argument (after `self`).

    A plain function gets a Session. Its signature is without the session, so that web frameworks read it right;
    it is pickled by its name, as functions are.
    """

    __signature__: Signature

    def __init__(
        self, box: SessionProvider, function: Callable[Concatenate[Any, P], R], propagation: Propagation
    ) -> None:
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise ConfigurationError(
                f"{function.__qualname__} is a generator: its body runs after the call, when its transaction is over"
            )
        functools.update_wrapper(self, function)  # first: it copies the attributes of a function that is one of these
        self._box = box
        self._function = function
        self._propagation = propagation
        self.__signature__ = _without_first(function, 1)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        before_session, after_session = self._without_class(args)
        return self._call(before_session, after_session, kwargs)

    def __reduce__(self) -> str:
        return self._function.__qualname__

    @overload
    def __get__(self, instance: None, owner: type) -> TransactionalFunction[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[..., R]: ...
    def __get__(self, instance: object | None, owner: type) -> object:
        """Binds a method: `self` stays first, the session is second."""
        if instance is None:
            return self
        return self._bound(instance)

    def _bound(self, instance: object) -> Callable[..., R]:
        @functools.wraps(self._function)
        def bound(*args: object, **kwargs: object) -> R:
            return self._call((instance,), args, kwargs)

        bound.__signature__ = _without_first(self._function, 2)  # type: ignore[attr-defined]
        return bound

    def _without_class(self, args: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """Returns what goes before the session, and what follows it. Since Python 3.13 a classmethod does not ask
        `__get__`: it calls this function with its class first.
        """
        if args and isinstance(args[0], type):
            attributes = (attribute for base_class in args[0].__mro__ for attribute in vars(base_class).values())
            if any(isinstance(attribute, classmethod) and attribute.__func__ is self for attribute in attributes):
                return args[:1], args[1:]
        return (), args

    def _call(self, before_session: tuple[object, ...], args: tuple[object, ...], kwargs: dict[str, Any]) -> R:
        _refuse_surplus_session(self._function, before_session, args, kwargs)
        with session_for(self._box, self._propagation) as session:
            return self._function(*before_session, session, *args, **kwargs)  # type: ignore[arg-type]


class AsyncTransactional(TransactionalFunction[P, R]):
    """The same for an `async def`: it gets an AsyncSession and is awaited. A separate class, since frameworks check
    whether `__call__` is a coroutine function.
    """

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # type: ignore[override]
        before_session, after_session = self._without_class(args)
        return await self._awaited(before_session, after_session, kwargs)

    def _bound(self, instance: object) -> Callable[..., Any]:
        @functools.wraps(self._function)
        async def bound(*args: object, **kwargs: object) -> Any:
            return await self._awaited((instance,), args, kwargs)

        bound.__signature__ = _without_first(self._function, 2)  # type: ignore[attr-defined]
        return bound

    async def _awaited(
        self, before_session: tuple[object, ...], args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> Any:
        function: Callable[..., Any] = self._function
        _refuse_surplus_session(function, before_session, args, kwargs)
        async with async_session_for(self._box, self._propagation) as session:
            return await function(*before_session, session, *args, **kwargs)


def transactional(
    box: SessionProvider, function: Callable[Concatenate[Any, P], R], propagation: Propagation
) -> TransactionalFunction[P, R]:
    """Decorate a plain function or an `async def`."""
    is_async = iscoroutinefunction(function) or isinstance(function, AsyncTransactional)
    kind = AsyncTransactional if is_async else TransactionalFunction
    return kind(box, function, propagation)


def _refuse_surplus_session(
    function: Callable[..., Any], before_session: tuple[object, ...], args: tuple[object, ...], kwargs: dict[str, Any]
) -> None:
    """Raise TypeError for a call that brings the session itself. Python's own error would count one argument more than
    the caller sees in the call.
    """
    if not args or not isinstance(args[0], _SESSIONS):
        return
    try:
        signature(function).bind(*before_session, None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{function.__qualname__}() gets its session from @box.transactional: call it without one; to publish in a "
            "session of your own, leave the decorator out and call box.publish(..., session=session)"
        ) from error


def _without_first(function: Callable[..., Any], count: int) -> Signature:
    """Returns the callers' signature: without the session, and without the `self` of a bound method."""
    full_signature = signature(function)
    return full_signature.replace(parameters=list(full_signature.parameters.values())[count:])


@contextmanager
def session_for(box: SessionProvider, propagation: Propagation) -> Iterator[Session]:
    """Yields the session of a transactional function; commits or rolls back what it opened itself."""
    current = box.current_session()
    if isinstance(current, AsyncSession) and propagation is not Propagation.REQUIRES_NEW:
        raise ConfigurationError(
            "a plain transactional function cannot join an AsyncSession's transaction; make it `async def`"
        )
    match propagation:
        case Propagation.REQUIRED if isinstance(current, Session):
            yield current
        case Propagation.NESTED if isinstance(current, Session):
            with current.begin_nested():
                yield current
        case Propagation.REQUIRED | Propagation.REQUIRES_NEW | Propagation.NESTED:
            with box.new_session() as session, box.as_current(session), session.begin():
                yield session
        case _:
            assert_never(propagation)


@asynccontextmanager
async def async_session_for(box: SessionProvider, propagation: Propagation) -> AsyncIterator[AsyncSession]:
    """The same for `async def`."""
    current = box.current_session()
    if isinstance(current, Session) and propagation is not Propagation.REQUIRES_NEW:
        raise ConfigurationError(
            "an async transactional function cannot join a plain Session's transaction; call it outside of one"
        )
    match propagation:
        case Propagation.REQUIRED if isinstance(current, AsyncSession):
            yield current
        case Propagation.NESTED if isinstance(current, AsyncSession):
            async with current.begin_nested():
                yield current
        case Propagation.REQUIRED | Propagation.REQUIRES_NEW | Propagation.NESTED:
            async with box.new_async_session() as session:
                with box.as_current(session):
                    async with session.begin():
                        yield session
        case _:
            assert_never(propagation)
