"""Publishing to RocketMQ does what publishing to every broker does, on real servers; but it takes no empty body."""

from __future__ import annotations

import pytest

from outbox_core.messages.broker_port import Broker
from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.delayed_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.engine_under_test import EngineUnderTest
from tests.broker_adapter.publishing.outbox_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.publisher_conformance import *  # noqa: F403
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.outbox.shop_fixtures import sqlite_shop  # noqa: F401


@pytest.mark.parametrize("body", [b"\x00\xff\xfe not text", b"x" * 900_000], ids=["bytes", "900 kB"])
def test_any_body_arrives_byte_for_byte(  # in the place of the one that has an empty body as well
    engine: EngineUnderTest, foreign: Broker, made_topic: str, body: bytes
) -> None:
    [result] = foreign.publish([message(made_topic, 0, body=body)])
    [read] = engine.read(made_topic, count=1)

    assert (result.status, read.body, read.key, read.content_type) == (PublishStatus.STORED, body, None, None)


def test_an_empty_body_is_rejected_with_the_reason(engine: EngineUnderTest, foreign: Broker, made_topic: str) -> None:
    results = foreign.publish([message(made_topic, 0), message(made_topic, 1, body=b""), message(made_topic, 2)])

    assert [one.status for one in results] == [PublishStatus.STORED, PublishStatus.REJECTED, PublishStatus.STORED]
    assert "empty body" in str(results[1].error)
    assert [one.body for one in engine.read(made_topic, count=2)] == [b"0", b"2"]
