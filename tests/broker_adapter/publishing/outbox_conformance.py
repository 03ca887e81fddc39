"""What an Outbox and its compensator do over any publisher whose server is killed. Not collected by itself."""

from __future__ import annotations

import time

from sqlalchemy.orm import Session

from outbox_core.messages.connect import connect
from tests.broker_adapter.publishing.engine_under_test import EngineUnderTest
from tests.broker_adapter.publishing.publisher_conformance import with_option
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS = 300
PAYMENTS = 60


def test_what_was_committed_while_the_server_was_down_is_resent_and_read_by_the_plain_client(
    sqlite_shop: Shop, own_engine: EngineUnderTest, topic: str
) -> None:
    own_engine.make_topic(topic)
    url = with_option(own_engine.url, "timeout_ms=1000")
    box = sqlite_shop.box(url)

    @box.transactional
    def pay(session: Session, number: int) -> None:
        session.add(Payment(id=number))
        box.publish(topic, {"payment": number}, key=f"k{number % 3}")

    for number in range(PAYMENTS):
        if number == PAYMENTS // 3:
            own_engine.kill()
        pay(number)
    box.close()
    own_engine.start()
    waiting = len(sqlite_shop.rows())
    broker = connect(url)
    sqlite_shop.closing.callback(broker.close)
    scan = sqlite_shop.scan(broker)
    deadline = time.monotonic() + WAIT_SECONDS
    while sqlite_shop.rows():
        assert time.monotonic() < deadline, sqlite_shop.rows()
        sqlite_shop.end_leases()
        sqlite_shop.end_delays()
        scan.run()
    read = own_engine.read(topic, count=PAYMENTS)

    assert waiting >= PAYMENTS // 3
    assert (sqlite_shop.payments(), sqlite_shop.archived()) == (list(range(PAYMENTS)), PAYMENTS)
    assert {one.body for one in read} == {b'{"payment":%d}' % number for number in range(PAYMENTS)}
    assert len({one.id for one in read}) == PAYMENTS
    assert {(one.key, one.content_type) for one in read} == {(f"k{n}", "application/json") for n in range(3)}
