"""Remembers why due messages cannot be dispatched, until they are again, for readiness checks. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outbox_core.common.errors import OutboxError, StorageFailed


class DispatchHealth:
    """The outcome of the last attempt to dispatch. One thread attempts at a time; any may check."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Note how an attempt ends; its error is raised all the same."""
        try:
            yield
        except Exception as error:
            self._error = error
            raise
        self._error = None

    def failure(self) -> StorageFailed | None:
        """Returns why nothing due is dispatched, and the cure; None if the last attempt succeeded."""
        error = self._error
        if error is None:
            return None
        cause = str(error) if isinstance(error, OutboxError) else f"{type(error).__name__}; see the program's log"
        failure = StorageFailed(f"due messages are not dispatched: {cause}")
        failure.__cause__ = error.__cause__
        return failure

    def check(self) -> None:
        """Raise StorageFailed if the last attempt failed, with its cause."""
        failure = self.failure()
        if failure is not None:
            raise failure
