"""A consumer process whose handler ends it. Run as a module; not imported.

Arguments: `BROKER_URL plain|async`.
"""

from __future__ import annotations

import logging
import sys

from outbox import consumer, run_consumers
from outbox_core import Delivery


@consumer("orders", group="g")
def handle(_one: Delivery) -> None:
    """Ask for the end of the process, with a status of its own."""
    sys.exit(0)


@consumer("orders", group="g")
async def handle_async(_one: Delivery) -> None:
    """The same."""
    sys.exit(0)


logging.basicConfig(level=logging.INFO)
run_consumers([handle_async if sys.argv[2] == "async" else handle], broker=sys.argv[1]).run_until_signal()
