"""What of a batch is sent together, and what becomes of each message after each answer."""

from __future__ import annotations

from typing import Any

import pytest
from pika.exceptions import ChannelClosedByBroker

from broker_adapter.rabbitmq.connection import Answer, ConfirmOutcome
from broker_adapter.rabbitmq.rabbitmq_publisher import PIPELINED_BYTES, RabbitMqBatchResults
from outbox_core.common.errors import BrokerRefused, BrokerUnavailable, NotAuthorized, StorageFailed
from outbox_core.messages.message import Message, PublishStatus

TOO_LARGE = ChannelClosedByBroker(406, "PRECONDITION_FAILED - message size 9 is larger than configured max size 8")
CONFIRMED, NACKED, RETURNED = ConfirmOutcome.CONFIRMED, ConfirmOutcome.NACKED, ConfirmOutcome.RETURNED
STORED, DEFERRED, REJECTED = PublishStatus.STORED, PublishStatus.DEFERRED, PublishStatus.REJECTED


def batch_of(*bodies: bytes, **parts: Any) -> RabbitMqBatchResults:
    messages = [Message(id=str(n), topic="t", body=body, **parts) for n, body in enumerate(bodies)]
    return RabbitMqBatchResults(messages, frame_bytes_max=131_072, addresses="mq:5672")


def answer(
    batch: RabbitMqBatchResults, *outcomes: ConfirmOutcome | None, refusal: ChannelClosedByBroker | None = None
) -> None:
    """Answer the next run."""
    batch.settle(batch.next_run(confirmed_bytes_max=0), Answer(outcomes=outcomes, refusal=refusal))


def statuses(batch: RabbitMqBatchResults) -> list[PublishStatus]:
    return [one.status for one in batch.in_order()]


def test_a_body_larger_than_any_that_the_server_took_goes_alone_and_the_others_together() -> None:
    large = b"x" * (PIPELINED_BYTES + 1)
    batch = batch_of(b"", b"", large, b"")

    runs = []
    while batch.pending:
        runs.append(list(batch.next_run(confirmed_bytes_max=0)))
        answer(batch, *[CONFIRMED] * len(runs[-1]))

    assert runs == [[0, 1], [2], [3]]
    assert list(batch_of(b"", large, b"").next_run(confirmed_bytes_max=len(large))) == [0, 1, 2]


def test_one_of_several_that_ends_the_channel_is_refused_with_what_was_confirmed_and_all_else_in_doubt() -> None:
    batch = batch_of(b"", b"", b"", b"")

    with pytest.raises(BrokerRefused, match="larger than configured") as raised:
        answer(batch, CONFIRMED, None, CONFIRMED, None, refusal=TOO_LARGE)

    assert raised.value.in_doubt
    assert {number: one.status for number, one in raised.value.answered.items()} == {0: STORED, 2: STORED}


def test_one_alone_that_ends_the_channel_is_rejected() -> None:
    batch = batch_of(b"")

    answer(batch, None, refusal=TOO_LARGE)

    assert statuses(batch) == [REJECTED]
    assert "larger than configured" in str(batch.in_order()[0].error)


def test_what_was_confirmed_before_an_error_of_the_whole_is_said_with_it() -> None:
    with pytest.raises(NotAuthorized) as raised:
        answer(batch_of(b"", b""), CONFIRMED, None, refusal=ChannelClosedByBroker(403, "ACCESS_REFUSED"))

    assert list(raised.value.answered) == [0]


def test_after_a_message_that_waits_none_of_its_key_is_reported_as_stored() -> None:
    messages = [Message(id=str(n), topic="t", body=b"", key=key) for n, key in enumerate(["a", "a", "b", "a", None])]
    batch = RabbitMqBatchResults(messages, frame_bytes_max=131_072, addresses="mq:5672")

    answer(batch, CONFIRMED, NACKED, CONFIRMED, CONFIRMED, CONFIRMED)

    assert statuses(batch) == [STORED, DEFERRED, STORED, DEFERRED, STORED]
    assert str(batch.in_order()[3].error).endswith("its key waits: 1")


def test_the_same_key_of_another_topic_does_not_wait() -> None:
    messages = [Message(id=topic, topic=topic, body=b"", key="a") for topic in ("t", "u")]
    batch = RabbitMqBatchResults(messages, frame_bytes_max=131_072, addresses="mq:5672")

    answer(batch, RETURNED, CONFIRMED)

    assert statuses(batch) == [DEFERRED, STORED]


def test_an_exchange_that_is_gone_defers_what_it_did_not_confirm() -> None:
    batch = batch_of(b"", b"", b"")

    answer(batch, CONFIRMED, None, None, refusal=ChannelClosedByBroker(404, "NOT_FOUND - no exchange 'shop'"))

    assert statuses(batch) == [STORED, DEFERRED, DEFERRED]


@pytest.mark.parametrize(("code", "kind"), [(403, NotAuthorized), (506, StorageFailed), (541, BrokerUnavailable)])
def test_what_is_not_about_single_messages_is_raised(code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="mq:5672"):
        answer(batch_of(b"", b""), None, None, refusal=ChannelClosedByBroker(code, "text"))


def test_what_amqp_cannot_carry_is_rejected_and_not_sent() -> None:
    headers = {"content-type": "x" * 256}, {"note": "y" * 4_000}, {"cc": "y"}, {"CC": "y"}, {"BCC": "y"}
    messages = [Message(id=str(n), topic="t", body=b"", headers=one) for n, one in enumerate(headers)]
    batch = RabbitMqBatchResults(messages, frame_bytes_max=4_096, addresses="mq:5672")

    answer(batch, CONFIRMED)

    assert statuses(batch) == [REJECTED, REJECTED, STORED, REJECTED, REJECTED]
    assert ["content type" in str(batch.in_order()[0].error), "frame_max" in str(batch.in_order()[1].error)] == [
        True
    ] * 2


def test_a_time_before_1970_is_left_out_and_fails_no_batch() -> None:
    [frame] = batch_of(b"", created_at_ms=-5_000).next_run(confirmed_bytes_max=0).values()

    assert frame.properties.timestamp is None
    assert frame.properties.encode()  # type: ignore[no-untyped-call]
