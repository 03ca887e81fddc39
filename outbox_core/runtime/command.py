"""The command `outbox` as a process: an interrupt ends it with a sentence, also while it is still being imported.

It imports nothing of ours: what the command does is found by entry point, as brokers are.
"""

from __future__ import annotations

import sys
from typing import Final

GROUP: Final = "outbox.main"
EXIT_INTERRUPTED: Final = 130


def main() -> None:
    """Import the command, and run it."""
    try:
        from importlib.metadata import entry_points

        (entry,) = entry_points(group=GROUP)
        run = entry.load()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was begun\n")
        sys.exit(EXIT_INTERRUPTED)
    run()
