"""A call to Pulsar's client ends at the deadline of its batch, however long the client itself would wait."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.pulsar.client_settings import ClientSettings
from broker_adapter.pulsar.record_sender import PulsarRecord, PulsarRecordSender
from outbox_core.common.clock import SystemClock
from outbox_core.common.errors import BrokerUnavailable

CLIENT_SECONDS = 5
CALL_MS = 300
WAIT_SECONDS = 60
RECORD = PulsarRecord(topic="persistent://public/default/t", key=None, body=b"", properties={}, event_timestamp_ms=None)


def test_a_producer_that_is_not_made_in_time_ends_the_batch_at_its_deadline_and_the_client_at_its_own() -> None:
    clock = SystemClock()
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = BrokerUrl.parse(f"pulsar://127.0.0.1:{silent.getsockname()[1]}", port=6650)
        settings = ClientSettings.of(url, timeout_ms=CLIENT_SECONDS * 1_000)
        connection = PulsarRecordSender(settings, clock=clock)
        begin = time.monotonic()

        with pytest.raises(BrokerUnavailable, match="Timeout"):
            connection.store([RECORD], {}, deadline_ms=clock.monotonic_ms() + CALL_MS)
        connection.close()
        took_seconds = time.monotonic() - begin
        for thread in set(threading.enumerate()) - before:
            thread.join(WAIT_SECONDS)

        assert not set(threading.enumerate()) - before
    assert took_seconds < CLIENT_SECONDS
