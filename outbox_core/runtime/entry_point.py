"""The entry point of the command `outbox`: an interrupt ends it with a message, also during its import.

It imports none of our packages: the command's implementation is found by entry point, as brokers are. With `python -m
outbox` the package is imported first, and an interrupt in that half second is Python's to show.
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
