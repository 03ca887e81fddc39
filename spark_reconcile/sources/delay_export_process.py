"""Exports what a delay cluster holds, by a process of its own, which ends with its JVM and its clients.

The command is `outbox delay export`: it reads the shards' ledgers beside their owners, and writes logs in the broker's
format.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import DelaySource

_USAGE: Final = 2
_ERROR: Final = "error: "
_SHOWN_MAX: Final = 500


class DelayExport(msgspec.Struct, frozen=True, kw_only=True):
    """What `outbox delay export --json` prints: when it began, and since when all cancels are remembered."""

    begun_ms: int
    messages: int
    cancels: int
    cancels_since_ms: int


def export_delay(source: DelaySource, folder: Path, *, seconds_max: int) -> DelayExport:
    """Export to a folder that is not there yet. Raises ConfigurationError, which names the cure, and NotComparable."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "outbox", "delay", "export", "--json"]
    command += ["--store", source.store, "--folder", str(folder)]
    command += ["--config", str(source.config)] if source.config is not None else []
    try:
        done = subprocess.run(  # noqa: S603 - our own command, its arguments are no shell's
            command, capture_output=True, text=True, check=False, timeout=seconds_max, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise NotComparable(
            f"the delay cluster {source.store} could not be read within {seconds_max} s: see whether its bookies answer"
        ) from error
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout, type=DelayExport)
    error_line = next((line for line in reversed(done.stderr.splitlines()) if line.startswith(_ERROR)), "")
    end = f"`outbox delay export` ended with status {done.returncode}: {done.stderr[-_SHOWN_MAX:]}"
    reason = error_line.removeprefix(_ERROR) or end
    why = f"the delay cluster {source.store} cannot be read: {reason}"
    raise (ConfigurationError if done.returncode == _USAGE else NotComparable)(why)
