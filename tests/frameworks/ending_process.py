"""A business process that pays twenty times and ends. Run as a module; not imported.

Arguments: `URL SCHEMA BROKER_URL TOPIC HOW`. It closes its Outbox, raises, or just comes to its end; `mute` has a short
deadline, for a broker that never answers.
"""

from __future__ import annotations

import sys

from sqlalchemy.orm import Session

from outbox import Outbox, SenderLimits
from tests.outbox.shop import Payment

url, schema, broker, topic, how = sys.argv[1:]
limits = SenderLimits(lease_ms=60_000, lease_margin_ms=1_000, close_timeout_ms=300 if how == "mute" else 120_000)
box = Outbox(url, broker=broker, schema=schema or None, sender=limits)
for number in range(20):
    with Session(box.engine) as session, session.begin():
        session.add(Payment(id=number))
        box.publish(topic, str(number), session=session)
if how == "close":
    assert box.close()
if how == "raise":
    raise SystemExit(3)
