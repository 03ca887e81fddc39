"""One of several consumer processes that share a group on a broker server. Run as a module; not imported.

Arguments: `URL SCHEMA BROKER_URL INVISIBLE_MS`. It says each message that its handler has done, before
the commit, and refuses every seventh at the first attempt; and `ready` once a SIGTERM would stop it in good order.
"""

from __future__ import annotations

import signal
import sys
import threading

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox import consumer, run_consumers
from outbox_core import Delivery
from tests.outbox.shop import Payment

url, schema, broker_url, invisible_ms = sys.argv[1:5]
engine = create_engine(url, pool_pre_ping=True)


@consumer(
    "orders", group="payments", inbox=engine, schema=schema or None,
    workers=2, prefetch=10, invisible_ms=int(invisible_ms),
)  # fmt: skip
def pay(session: Session, one: Delivery) -> None:
    """Pay, once: a second payment would break the primary key, a second increment would show."""
    number = int(one.body)
    if one.attempt == 1 and number % 7 == 0:
        raise RuntimeError("not at the first attempt")
    session.add(Payment(id=number))
    session.flush()
    session.execute(text("UPDATE payment SET note = note + 1 WHERE id = -1"))
    print(number, flush=True)


def say_when_ready() -> None:
    """run_until_signal() says nothing itself."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        threading.Event().wait(0.005)
    print("ready", flush=True)


threading.Thread(target=say_when_ready, daemon=True).start()
sys.exit(0 if run_consumers([pay], broker=broker_url).run_until_signal() else 1)
