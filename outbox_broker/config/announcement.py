"""Says that a server can serve: in the file for scripts first, then, since people may wait for it, on stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from outbox_broker.log.disk_reserve import FULL
from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.event_logger import EventLogger

logger: EventLogger = EventLogger(__name__)


def announce(url: str, ready_file: Path | None, *, what: str) -> None:
    """Report readiness. A full disk is no reason not to serve. Raises ConfigurationError if the file cannot be made."""
    if ready_file is not None:
        try:
            unfinished = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
            unfinished.write_text(url + "\n", encoding="utf-8")
            unfinished.replace(ready_file)
        except OSError as error:
            if error.errno not in FULL:
                raise ConfigurationError(f"cannot write the ready file {ready_file}: {error.strerror}") from error
            logger.warning("ready_file_not_written", extra={"file": str(ready_file), "error": error.strerror})
    print(f"{what} ready at {url}", file=sys.stderr, flush=True)  # noqa: T201


def forget(ready_file: Path | None) -> None:
    """Remove what says that a server can serve: one that was killed left it behind."""
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
