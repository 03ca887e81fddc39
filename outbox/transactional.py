"""@box.transactional: opens, joins or nests the transaction that a business function runs in.

Not what is published in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, assert_never, overload

from sqlalchemy.orm import Session

from messaging.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox.box import Outbox

P = ParamSpec("P")
R = TypeVar("R")


class Propagation(StrEnum):
    """What a transactional function does about a transaction that is open already.

    required: joins it, or opens one. requires_new: always opens one of its own, on another connection, that commits
    or rolls back by itself. nested: a savepoint inside it, or a new transaction where none is open.
    """

    REQUIRED = "required"
    REQUIRES_NEW = "requires_new"
    NESTED = "nested"


class Transactional(Generic[P, R]):
    """A business function that is called without a session and gets one as its first argument (behind `self`)."""

    def __init__(self, box: Outbox, function: Callable[Concatenate[Session, P], R], propagation: Propagation) -> None:
        if iscoroutinefunction(function):
            raise ConfigurationError(
                f"{function.__qualname__} is async; open an AsyncSession in it and call publish(..., session=session)"
            )
        if isgeneratorfunction(function) or isasyncgenfunction(function):
            raise ConfigurationError(
                f"{function.__qualname__} is a generator: its body would run when the transaction is over; "
                "use `with box.begin() as connection` or a Session in it, and call publish(..., session=...)"
            )
        self._box = box
        self._function = function
        self._propagation = propagation
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with session_for(self._box, self._propagation) as session:
            return self._function(session, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Transactional[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[..., R]: ...
    def __get__(self, instance: object | None, owner: type) -> object:
        """A method keeps `self` first: the session comes second."""
        if instance is None:
            return self

        @functools.wraps(self._function)
        def bound(*args: object, **kwargs: object) -> R:
            with session_for(self._box, self._propagation) as session:
                return self._function(instance, session, *args, **kwargs)  # type: ignore[arg-type]

        return bound


@contextmanager
def session_for(box: Outbox, propagation: Propagation) -> Iterator[Session]:
    """The session of a transactional function; what was opened here is committed or rolled back here."""
    current = box.current_session()
    match propagation:
        case Propagation.REQUIRED if current is not None:
            yield current
        case Propagation.NESTED if current is not None:
            with current.begin_nested():
                yield current
        case Propagation.REQUIRED | Propagation.REQUIRES_NEW | Propagation.NESTED:
            with box.new_session() as session, box.as_current(session), session.begin():
                yield session
        case _:
            assert_never(propagation)
