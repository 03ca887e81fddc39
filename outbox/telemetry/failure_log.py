"""FailureLog: logs failures, with a traceback at most once a minute for each kind. Handles no failure.

The record with the traceback is an ERROR, which error trackers report; repetitions within the minute are WARNINGs of
one line. No record contains the parameters of a failed statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy.exc import StatementError

from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError
from outbox_core.runtime.event_logger import EventLogger
from outbox_core.runtime.log_interval import LogInterval

_CHAIN_MAX: Final = 100

_Kind = tuple[object, ...]


class FailureLog:
    """The recent failures of one runner. Thread-safe."""

    def __init__(self, logger: EventLogger, *, clock: Clock) -> None:
        self._logger = logger
        self._tracebacks = LogInterval(clock)

    def write(self, event: str, error: BaseException, *, fields: Mapping[str, object], kind: _Kind = ()) -> None:
        """Log a failure. `kind` distinguishes failures of the same line of code, for instance by topic and group.

        The field `repeated` of the next traceback's record counts the failures since the last one.
        """
        self._write(event, error, fields, kind, traced=True)

    def write_outage(self, event: str, error: BaseException, *, fields: Mapping[str, object], kind: _Kind = ()) -> None:
        """Log an outage of a broker or a database: as `write` does, but without a traceback for our own errors, whose
        text names what is unavailable.
        """
        self._write(event, error, fields, kind, traced=not isinstance(error, OutboxError))

    def _write(
        self, event: str, error: BaseException, fields: Mapping[str, object], kind: _Kind, *, traced: bool
    ) -> None:
        repeated = self._tracebacks.passed_over((event, *kind, type(error), _raised_at(error)))
        if repeated is None:
            self._logger.warning(event, extra=dict(fields))
            return
        hide_values(error)
        self._logger.error(event, extra={**fields, "repeated": repeated}, exc_info=error if traced else None)


def root_cause(error: BaseException) -> BaseException:
    """Returns the first error of the chain of `raise ... from ...`; the error itself if there is no chain."""
    *_, root = _causes(error)
    return root


def hide_values(error: BaseException) -> None:
    """Make SQLAlchemy's errors in a traceback's chain omit the parameters of their statements from their texts."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _CHAIN_MAX:
        cause = waiting.pop()
        seen.add(id(cause))
        if isinstance(cause, StatementError):
            cause.hide_parameters = True
        grouped = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        waiting += [
            linked for linked in (cause.__cause__, cause.__context__, *grouped) if linked and id(linked) not in seen
        ]


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _raised_at(error: BaseException) -> tuple[str, int] | None:
    """Returns the file and line that raised the error."""
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
