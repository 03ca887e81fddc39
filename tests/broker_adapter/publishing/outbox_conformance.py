"""What an Outbox and its compensator do over any publisher whose server is killed. Not collected by itself."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import PublishStatus
from tests.broker_adapter.publishing.engine_under_test import EngineUnderTest, Poison
from tests.broker_adapter.publishing.publisher_conformance import message, with_option
from tests.outbox.shop import Payment, Shop

WAIT_SECONDS = 300
PAYMENTS = 60
ROW_BODY_BYTES_MAX = 4 * 1024 * 1024


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


def test_rows_that_the_engine_refuses_are_parked_alone_with_the_reason_and_their_neighbours_arrive_once(
    sqlite_shop: Shop, engine: EngineUnderTest, topic: str
) -> None:
    other = f"{topic}.second"
    engine.make_topic(other)
    box = sqlite_shop.box(engine.url)
    poisons = [one for one in engine.poisons(topic) if one.status is PublishStatus.REJECTED and fits_a_row(one)]
    if not poisons:
        pytest.skip("this engine refuses only what an Outbox refuses before")
    expected: dict[str, set[str]] = defaultdict(set)

    with Session(sqlite_shop.engine) as session, session.begin():
        for number, poison in enumerate(poisons):
            for neighbour in (poison.beside or poison.topic, other):
                message_id = f"n{number}-{neighbour[-12:]}"
                box.publish(neighbour, b"sound", key=message_id, message_id=message_id, session=session)
                expected[neighbour].add(message_id)
            parts = {"key": None, "body": b"poison", **poison.parts}
            body = parts.pop("body")
            box.publish(poison.topic, body, message_id=f"p{number}", session=session, **parts)
    box.close()
    broker = connect(engine.url)
    sqlite_shop.closing.callback(broker.close)
    sqlite_shop.end_leases()
    sqlite_shop.end_delays()
    sqlite_shop.scan(broker).run()

    rows = {row["id"]: (row["state"], str(row["last_error"]).lower()) for row in sqlite_shop.rows()}
    assert set(rows) == {f"p{number}" for number in range(len(poisons))}
    for number, poison in enumerate(poisons):
        state, error = rows[f"p{number}"]
        assert (state, poison.says.lower() in error) == ("parked", True), (poison, error)
    for name, ids in expected.items():
        assert sorted(one.id for one in engine.read(name, count=len(ids))) == sorted(ids)


def test_an_outbox_ends_what_it_connected_by_a_url_and_leaves_a_broker_that_it_was_given(
    sqlite_shop: Shop, engine: EngineUnderTest, made_topic: str, open_broker: Callable[[str], Broker]
) -> None:
    given = open_broker(engine.url)
    for broker in (engine.url, given):
        box = sqlite_shop.box(broker)
        with Session(sqlite_shop.engine) as session, session.begin():
            box.publish(made_topic, b"sound", session=session)
        box.close()

        used = box.broker
        if broker is given:
            assert [one.status for one in used.publish([message(made_topic, 0)])] == [PublishStatus.STORED]
        else:
            with pytest.raises(ConfigurationError, match="closed"):
                used.publish([message(made_topic, 0)])


def fits_a_row(poison: Poison) -> bool:
    """Whether an Outbox takes it, which has a limit of its own for bodies."""
    return len(poison.parts.get("body", b"")) <= ROW_BODY_BYTES_MAX
