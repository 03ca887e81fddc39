"""Reconciles by the hour in a process of its own, and tells each step and write, so that it can be killed. Not a test.

python -m tests.spark_reconcile.killed_run CONFIG OUTPUT
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from spark_reconcile import run_windows
from spark_reconcile.core.settings_file import read_config, settings_of
from tests.spark_reconcile.world import HOUR_MS, NOW_MS

SINCE_MS = NOW_MS - 5 * HOUR_MS


def main(config: Path, output: Path) -> None:
    """One run; a line on standard output for each thing that it does."""
    settings = replace(settings_of(read_config(config), folder=config.parent), output=output)
    run_windows(
        settings, since_ms=SINCE_MS, now_ms=NOW_MS, master="local[2]", pause=lambda _: None, say=_tell, checkpoint=_tell
    )


def _tell(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
