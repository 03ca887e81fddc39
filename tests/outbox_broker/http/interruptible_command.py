"""Runs `outbox` so that an interrupt reaches it, also where a shell began all of this in its background. Not a test."""

from __future__ import annotations

import signal
import sys

from outbox_core.runtime.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1:])
