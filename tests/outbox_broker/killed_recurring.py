"""Runs an engine with a recurring message that comes minute by minute, until its process dies. Not a test."""

from __future__ import annotations

import sys
from pathlib import Path

from outbox_broker.common.engine_options import EngineOptions
from outbox_broker.engine.engine import Engine
from outbox_broker.log.storage import DiskStorage, Storage
from outbox_core.common.clock import ManualClock
from outbox_core.messages.recurring_message import RecurringMessage
from tests.outbox_broker.killed_engine import RESERVE_BYTES, START_MS, teller, type_of_tell
from tests.outbox_broker.polling import until

TOPIC, NAME = "reports", "minutely"
MINUTE_MS = 60_000
OPTIONS = EngineOptions(segment_bytes=4096, checkpoint_bytes=4096, reserve_bytes=RESERVE_BYTES)
MESSAGE = RecurringMessage(topic=TOPIC, cron="* * * * *", body=b"x" * 700)


def recurring_run(
    folder: Path, storage: Storage, tell: type_of_tell, *, start_ms: int = START_MS, minutes: int = 5
) -> None:  # fmt: skip
    """Each minute is told before it comes, and when its message is there; there are pauses and a checkpoint between."""
    clock = ManualClock(start_ms)
    engine = Engine.open(folder, clock=clock, options=OPTIONS, storage=storage)
    engine.recurring.add(NAME, MESSAGE)
    tell(answered="add")
    for minute in range(minutes):
        now_ms = clock.now_ms() + MINUTE_MS
        tell(now_ms=now_ms)
        clock.advance(MINUTE_MS)
        until(lambda to_ms=now_ms: engine.recurring.view(NAME).fired_to_ms == to_ms)  # type: ignore[misc]
        if minute % 3 == 1:
            engine.recurring.pause(NAME, paused=True)
            engine.writer.write_checkpoint()
            engine.recurring.pause(NAME, paused=False)
        tell(answered="came")
    engine.close()


if __name__ == "__main__":
    recurring_run(
        Path(sys.argv[1]), DiskStorage(), teller(1), start_ms=int(sys.argv[2]), minutes=1_000_000
    )  # fmt: skip
