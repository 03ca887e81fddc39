"""The inbox knows a message by its topic and id: another's message under the same id keeps none from being handled."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox import Consumer, Outcome, consumer
from outbox.consumers.inbox_table import InboxStore
from outbox_core import Delivery
from tests.outbox.shop import Payment, Shop
from tests.outbox.watched_broker import message

TOPICS = ("orders", "refunds")


def paying(shop: Shop, topic: str, handled: list[str]) -> Consumer:
    @consumer(topic, group="payments", inbox=shop.engine, schema=shop.database.schema)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=1 + TOPICS.index(one.topic)))
        handled.append(one.topic)

    return pay


def on(topic: str) -> Delivery:
    return Delivery(receipt="r-1", attempt=1, message=message(topic=topic))


def test_messages_of_two_topics_under_one_id_are_both_handled_and_each_of_them_once(shop: Shop) -> None:
    handled: list[str] = []
    consumers = [paying(shop, topic, handled) for topic in TOPICS]

    outcomes = [one.handle(on(topic)) for _ in range(2) for one, topic in zip(consumers, TOPICS, strict=True)]

    assert outcomes == [Outcome.HANDLED, Outcome.HANDLED, Outcome.DEDUPLICATED, Outcome.DEDUPLICATED]
    assert (handled, shop.payments()) == ([*TOPICS], [1, 2])


def test_a_mark_is_asked_for_by_its_topic_and_purged_alone(shop: Shop) -> None:
    store = InboxStore(dialect=shop.engine.dialect, schema=shop.database.schema)
    inbox = shop.tables.inbox
    with shop.engine.begin() as connection:
        for topic in TOPICS:
            assert store.mark(connection, group="payments", message_id="m-1", topic=topic)
        connection.execute(inbox.update().where(inbox.c.topic == "refunds").values(handled_at_us=1))

    with shop.engine.begin() as connection:
        purged = store.purge(connection, older_than_us=60_000_000, limit=10)
        held = [store.handled(connection, group="payments", message_id="m-1", topic=one) for one in (*TOPICS, "others")]
        left = connection.scalars(select(inbox.c.topic)).all()

    assert (purged, held, left) == (1, [True, False, False], ["orders"])
