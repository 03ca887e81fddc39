"""A producer says when its broker is out and when it is back, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outbox import Outbox
from outbox_core import Message
from outbox_core.common.errors import BrokerUnavailable
from outbox_core.runtime.logs import event_name
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Shop


def outages(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if event_name(record).startswith("broker_outage")]


def publish(box: Outbox, number: int) -> None:
    with box.begin():
        box.publish("orders", str(number), message_id=f"m-{number}")


def test_an_outage_is_a_warning_when_it_begins_and_a_line_when_it_ends(
    sqlite_shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    broker, is_out = RecordingBroker(), [True]

    def refuse(_batch: Sequence[Message]) -> None:
        if is_out[0]:
            raise BrokerUnavailable("no answer") from OSError("connection refused")

    broker.rule = refuse
    box: Outbox = sqlite_shop.box(broker)
    for number in range(3):
        publish(box, number)
        broker.wait_for(lambda it, count=number + 1: len(it.batches) >= count)  # type: ignore[misc]
    is_out[0] = False
    publish(box, 3)
    assert box.close()

    began, ended = outages(caplog)
    assert (event_name(began), event_name(ended)) == ("broker_outage_began", "broker_outage_ended")
    assert (began.levelname, began.broker, began.error) == ("WARNING", "RecordingBroker", "no answer")
    assert began.cause == "connection refused"


def test_the_url_is_named_without_its_password(sqlite_shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    box: Outbox = sqlite_shop.box("redis://user:secret@127.0.0.1:1")
    publish(box, 1)
    box.close()

    (began,) = outages(caplog)
    assert "127.0.0.1:1" in began.broker
    assert "secret" not in began.broker + began.error + began.cause
