"""A consumer process whose broker takes an ack and never answers. Run as a module; not imported.

Arguments: `FOLDER`. Its stop gives up at once, and then it has nothing more to do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from outbox import consumer
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox_core import AckStatus
from tests.outbox.watched_broker import WAIT_SECONDS, WatchedBroker

came = threading.Event()


class HangingBroker(WatchedBroker):
    """An ack takes longer than anybody waits for this process."""

    def ack(self, receipts: Sequence[str]) -> list[AckStatus]:
        came.set()
        threading.Event().wait(3 * WAIT_SECONDS)
        return super().ack(receipts)


runner = ConsumerRunner([consumer("orders", group="g")(lambda _one: None)], broker=HangingBroker(Path(sys.argv[1])))
runner.start()
came.wait(WAIT_SECONDS)
print("stopped in time:", runner.stop(timeout_seconds=0.1), flush=True)
