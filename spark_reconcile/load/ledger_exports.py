"""Exports of what bookies keep to local folders, in the format of a broker's logs, by the broker's own commands.

Each is a process of its own, which ends with its JVM and its clients.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import LedgerSource, Settings

_USAGE: Final = 2
_ERROR: Final = "error: "
_SHOWN_MAX: Final = 500


def refresh_broker_export(settings: Settings) -> None:
    """Bring the export of a broker on BookKeeper up to what its bookies know to be confirmed; of a broker in a folder
    nothing is to be done. Before each look at `broker_data`: a record that is older than the look is in it then.

    Only what has come since the export before is read. Raises ConfigurationError, which names the cure, and
    NotComparable.
    """
    if settings.broker_store is not None:
        run_export(
            ["broker", "store", "export", "--json"], settings.broker_store, settings.broker_data, what="the broker",
            seconds_max=settings.limits.export_s_max,
        )  # fmt: skip


def run_export(command: Sequence[str], source: LedgerSource, folder: Path, *, what: str, seconds_max: int) -> str:
    """Run a command of `outbox` that exports to a folder; returns what it printed. Raises ConfigurationError, which
    names the cure, and NotComparable.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = ["--store", source.store, "--folder", str(folder)]
    options += ["--config", str(source.config)] if source.config is not None else []
    try:
        done = subprocess.run(  # noqa: S603 - our own command, its arguments are no shell's
            [sys.executable, "-m", "outbox", *command, *options], capture_output=True, text=True, check=False,
            timeout=seconds_max, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotComparable(
            f"{what} {source.store} could not be read within {seconds_max} s: see whether its bookies answer"
        ) from error
    if done.returncode == 0:
        return done.stdout
    error_line = next((line for line in reversed(done.stderr.splitlines()) if line.startswith(_ERROR)), "")
    end = f"`outbox {' '.join(command)}` ended with status {done.returncode}: {done.stderr[-_SHOWN_MAX:]}"
    reason = error_line.removeprefix(_ERROR) or end
    why = f"{what} {source.store} cannot be read: {reason}"
    raise (ConfigurationError if done.returncode == _USAGE else NotComparable)(why)
