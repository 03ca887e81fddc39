"""A schedule with much in memory: its checkpoint repeats all of it in one record. Not what a flush makes of it."""

from __future__ import annotations

import pytest

from outbox_broker.schedule.delay_store import TimedMessage
from outbox_core.journal.block import PAYLOAD_BYTES_MAX
from outbox_core.messages.limits import BODY_BYTES_MAX
from tests.outbox_broker.delay.conftest import DAY_MS, NOW_MS, Opened


@pytest.mark.slow
def test_what_many_publishers_stored_at_once_is_there_after_each_restart(opened: Opened) -> None:
    schedule = opened.open()
    body = b"x" * BODY_BYTES_MAX
    ids = [f"m{number}" for number in range(PAYLOAD_BYTES_MAX // BODY_BYTES_MAX + 1)]
    for one in ids:  # each found room before the first was stored
        schedule.put([TimedMessage(NOW_MS + DAY_MS, one, "t", body)], now_ms=NOW_MS)
    schedule.commit()

    for _ in range(2):  # the first restart begins the log anew by a checkpoint, from which the second one recovers
        schedule = opened.open()

    assert schedule.queries.count() == len(ids)
    assert schedule.queries.find(ids[-1]) is not None
