"""A consumer process that a poisonous message ends, as the OOM killer or a segmentation fault would. Run as a module.

Arguments: `BROKER_URL INVISIBLE_MS`. It ends by itself once its group has nothing left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping

from outbox import consumer, run_consumers
from outbox_core import Delivery, connect

TOPIC, GROUP, POISON = "orders", "payments", b"poison"
PREFETCH = 10


def main() -> None:
    """Consume until death, or until nothing is left."""
    broker_url, invisible_ms = sys.argv[1:3]

    @consumer(TOPIC, group=GROUP, prefetch=PREFETCH, invisible_ms=int(invisible_ms))
    def handle(delivery: Delivery) -> None:
        if delivery.body == POISON:
            os.kill(os.getpid(), signal.SIGKILL)

    broker = connect(broker_url)
    with run_consumers([handle], broker=broker):
        while _left(broker.admin.figures(TOPIC, GROUP)):
            time.sleep(0.01)
    broker.close()


def _left(figures: Mapping[str, int]) -> int:
    return figures["backlog"] + figures["in_flight"]


if __name__ == "__main__":
    main()
