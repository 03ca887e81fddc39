"""FailureLog: writes a failure to the log with its traceback, once a kind and minute. It handles nothing.

The record with the traceback is an ERROR, which is what error trackers that listen to `logging` report; repetitions
within the minute are WARNINGs of one line. No record has the values of a statement that failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy.exc import StatementError

from outbox_core.common.clock import Clock
from outbox_core.common.errors import OutboxError

REPEAT_MS: Final = 60_000
KINDS_MAX: Final = 1_000
"""Kinds that are remembered; the one that was first logged longest ago is forgotten first."""
_CHAIN_MAX: Final = 100

_Kind = tuple[object, ...]


class FailureLog:
    """What one runner has logged of late. Safe in any thread."""

    def __init__(self, logger: logging.Logger, *, clock: Clock) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[_Kind, tuple[int, int]] = {}

    def write(self, event: str, error: BaseException, *, fields: Mapping[str, object], kind: _Kind = ()) -> None:
        """Log the failure. `kind` tells failures apart that come from one line of code: a topic and a group, say.

        The record of the next minute has in `repeated` how often the kind failed without a traceback in between.
        """
        self._write(event, error, fields, kind, traced=True)

    def write_outage(self, event: str, error: BaseException, *, fields: Mapping[str, object], kind: _Kind = ()) -> None:
        """Log that a broker or a database gives nothing: as `write` does, without a traceback where the error is of our
        own tree, whose text says what is out.
        """
        self._write(event, error, fields, kind, traced=not isinstance(error, OutboxError))

    def _write(
        self, event: str, error: BaseException, fields: Mapping[str, object], kind: _Kind, *, traced: bool
    ) -> None:
        repeated = self._repeated((event, *kind, type(error), _raised_at(error)))
        if repeated is None:
            self._logger.warning(event, extra=dict(fields))
            return
        hide_values(error)
        self._logger.error(event, extra={**fields, "repeated": repeated}, exc_info=error if traced else None)

    def _repeated(self, kind: _Kind) -> int | None:
        """How many there were since the last traceback of the kind; None: that is not a minute ago."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            at_ms, repeated = self._logged.pop(kind, (now_ms - REPEAT_MS, 0))
            shown = now_ms - at_ms >= REPEAT_MS
            self._logged[kind] = (now_ms, 0) if shown else (at_ms, repeated + 1)
            if len(self._logged) > KINDS_MAX:
                del self._logged[next(iter(self._logged))]
        return repeated if shown else None


def root_cause(error: BaseException) -> BaseException:
    """What it all began with, as far as `raise ... from ...` says; the error itself where it says nothing."""
    *_, last = _causes(error)
    return last


def hide_values(error: BaseException) -> None:
    """Have the texts of SQLAlchemy's errors in a traceback's chain leave out the parameters of their statements."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _CHAIN_MAX:
        one = waiting.pop()
        seen.add(id(one))
        if isinstance(one, StatementError):
            one.hide_parameters = True
        parts = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [other for other in (one.__cause__, one.__context__, *parts) if other and id(other) not in seen]


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__


def _raised_at(error: BaseException) -> tuple[str, int] | None:
    """The file and line that raised it."""
    trace = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
