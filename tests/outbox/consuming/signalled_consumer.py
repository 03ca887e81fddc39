"""A consumer process as users write it: run_until_signal() is all of its main. Run as a module; not imported.

Arguments: `BROKER_URL`. Its handler says "begun ID", and goes on when it reads a line. What the
runner logs is said too.
"""

from __future__ import annotations

import logging
import sys

from outbox import consumer, run_consumers
from outbox_core import Delivery


@consumer("orders", group="g", invisible_ms=60_000)
def handle(one: Delivery) -> None:
    """Say that it has begun, and wait to be told to end."""
    print("begun", one.id, flush=True)
    sys.stdin.readline()


logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.exit(0 if run_consumers([handle], broker=sys.argv[1]).run_until_signal() else 1)
