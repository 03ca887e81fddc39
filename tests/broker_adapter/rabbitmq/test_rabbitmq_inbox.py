"""The guide's consumer: pika and the inbox. It dies at each step, and the effect happens once."""

from __future__ import annotations

from typing import Final

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from sqlalchemy.orm import Session

from outbox import Inbox
from outbox_core.messages.broker_port import Broker
from tests.broker_adapter.publishing.publisher_conformance import message
from tests.broker_adapter.rabbitmq.rabbitmq_engine import RabbitMqEngine
from tests.outbox.shop import Payment, Shop

CONSUMER: Final = "printer"
MESSAGES: Final = 3
WAIT_SECONDS: Final = 300


class DiedError(Exception):
    """The consumer ends here."""


def consume(shop: Shop, channel: BlockingChannel, topic: str, *, count: int, dies: str = "") -> None:
    """Enter a payment for each of so many deliveries."""
    inbox = Inbox(shop.engine, schema=shop.database.schema)
    deliveries = channel.consume(topic, inactivity_timeout=WAIT_SECONDS)
    for _, (method, properties, body) in zip(range(count), deliveries, strict=False):
        assert method is not None
        number = int(body)

        def pay(session: Session, number: int = number) -> None:
            session.add(Payment(id=number))

        with Session(shop.engine) as session, session.begin():
            inbox.handle(session, properties.message_id, CONSUMER, pay, topic=properties.type)
            session.flush()
            if dies == "before the commit":
                raise DiedError
        if dies == "before the acknowledgement":
            raise DiedError
        channel.basic_ack(method.delivery_tag)


@pytest.mark.parametrize("step", ["before the commit", "before the acknowledgement"])
def test_a_consumer_that_dies_has_its_effect_once(
    sqlite_shop: Shop, engine: RabbitMqEngine, foreign: Broker, made_topic: str, step: str
) -> None:
    foreign.publish([message(made_topic, n) for n in range(MESSAGES)])

    with pytest.raises(DiedError), engine.plain_channel() as channel:
        consume(sqlite_shop, channel, made_topic, count=MESSAGES, dies=step)
    with engine.plain_channel() as channel:
        consume(sqlite_shop, channel, made_topic, count=MESSAGES)

    assert sqlite_shop.payments() == list(range(MESSAGES))
    assert engine.read(made_topic, count=0) == []


def test_a_message_that_was_published_twice_has_its_effect_once(
    sqlite_shop: Shop, engine: RabbitMqEngine, foreign: Broker, made_topic: str
) -> None:
    for _ in range(2):
        foreign.publish([message(made_topic, 7)])

    with engine.plain_channel() as channel:
        consume(sqlite_shop, channel, made_topic, count=2)

    assert sqlite_shop.payments() == [7]
