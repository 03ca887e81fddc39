"""EventLogger: logs events with fields so that formatters that know nothing of the fields show them too.

A program that sets up no logging, or a format like "%(levelname)s %(message)s", shows `pull_failed url=... error=...`
and not the name of the event alone. The record's template is the name, so error trackers group by it, and its
attributes are the fields, as with `extra`. The text is made only where a handler formats the record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from outbox_core.runtime.logs import EventFields

_CALLERS: Final = 3
"""Frames from the standard library's logger to the caller of a method here: `_write`, the method, the caller."""

_ErrorInfo = bool | BaseException | None


class EventLogger:
    """The logger of one module: an event's name, and its fields in `extra`. Secrets in fields are masked."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, *, extra: Mapping[str, object] | None = None) -> None:
        """Log what happens in normal operation."""
        self._write(logging.INFO, event, extra)

    def warning(self, event: str, *, extra: Mapping[str, object] | None = None, exc_info: _ErrorInfo = None) -> None:
        """Log what the process gets over by itself."""
        self._write(logging.WARNING, event, extra, exc_info)

    def error(self, event: str, *, extra: Mapping[str, object] | None = None, exc_info: _ErrorInfo = None) -> None:
        """Log what somebody should look at."""
        self._write(logging.ERROR, event, extra, exc_info)

    def exception(self, event: str, *, extra: Mapping[str, object] | None = None, exc_info: bool = True) -> None:
        """Log an error with the traceback of the exception that is being handled; without it if `exc_info` is false."""
        self._write(logging.ERROR, event, extra, exc_info=exc_info)

    def critical(self, event: str, *, extra: Mapping[str, object] | None = None, exc_info: _ErrorInfo = None) -> None:
        """Log what this process cannot go on after."""
        self._write(logging.CRITICAL, event, extra, exc_info)

    def log(self, level: int, event: str, *, extra: Mapping[str, object] | None = None) -> None:
        """Log at a level of the standard library."""
        self._write(level, event, extra)

    def _write(self, level: int, event: str, extra: Mapping[str, object] | None, exc_info: _ErrorInfo = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        if extra:
            template = event + "%s"
            self._logger.log(level, template, EventFields(extra), extra=extra, exc_info=exc_info, stacklevel=_CALLERS)
        else:
            self._logger.log(level, event, exc_info=exc_info, stacklevel=_CALLERS)
