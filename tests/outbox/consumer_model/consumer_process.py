"""The consumers of a program as a process. Run as a module; not imported.

Arguments: `SEED DATABASE_URL BROKER_URL hangs|ends CALLS`: what was counted before, as JSON. It says what is counted, a
line each, before it goes on, and `ready` once a SIGTERM stops it in good order. With `hangs` a handler that hangs never
ends, and the stop has a short deadline. It exits with 0 if all ended in time.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from broker_adapter.http import HttpBroker
from outbox import Outbox, SenderLimits
from outbox.consumers.consumer_decorator import ConsumerRunner
from outbox.consumers.consumer_runner import RunnerTimes
from outbox_core.common.backoff import Backoff
from tests.outbox.consumer_model.handlers import Calls, Handlers, Meeting
from tests.outbox.consumer_model.program import PROCESSES, program

READY_POLL_SECONDS = 0.005
STOP_SECONDS = {"hangs": 1.0, "ends": 300.0}


def say(*words: str) -> None:
    """One write, so that a kill cuts no line."""
    os.write(sys.stdout.fileno(), f"{' '.join(words)}\n".encode())


def say_when_ready() -> None:
    """run_until_signal() says nothing itself."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        threading.Event().wait(READY_POLL_SECONDS)
    say("ready")


def main() -> int:
    """Consume until a signal."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    seed, url, broker_url, ending, counted = sys.argv[1:6]
    calls = Calls(say)
    for what, group, message_id, count in json.loads(counted):
        calls.counted[what][group, message_id] = count
    broker = HttpBroker(broker_url)
    box = Outbox(create_engine(url, pool_pre_ping=True), broker=broker, sender=SenderLimits(gather_ms=0))
    may_end = threading.Event()
    if ending == "ends":
        may_end.set()
    async_url = make_url(url).set(drivername="mysql+asyncmy").render_as_string(hide_password=False)
    handlers = Handlers(
        program(int(seed), PROCESSES), urls=(url, async_url), box=box, calls=calls, may_end=may_end, meeting=Meeting()
    )
    runner = ConsumerRunner(
        handlers.consumers(), broker=broker, pauses=Backoff(initial_ms=10, max_ms=100),
        times=RunnerTimes(pull_wait_ms=200, ack_delay_ms=5),
    )  # fmt: skip
    threading.Thread(target=say_when_ready, daemon=True).start()
    has_ended = runner.run_until_signal(timeout_seconds=STOP_SECONDS[ending])
    return 0 if has_ended else 1


sys.exit(main())
