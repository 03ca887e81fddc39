"""What SQLAlchemy's hooks really mean, shown on plain ones; ours are in tests/outbox. H1 to H12 of docs/traps.md."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, event, insert, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop


class NaiveOutbox:
    """Sends in after_commit what the session was given."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.sent: list[str] = []

    def send(self, _session: Session) -> None:
        """The hook."""
        self.sent += self.waiting
        self.waiting.clear()


@pytest.fixture
def naive() -> NaiveOutbox:
    """Fresh."""
    return NaiveOutbox()


@contextlib.contextmanager
def hooked(session: Session, naive: NaiveOutbox) -> Iterator[Session]:
    """The session with the hook."""
    event.listen(session, "after_commit", naive.send)
    try:
        yield session
    finally:
        event.remove(session, "after_commit", naive.send)


def test_naive_after_commit_fires_when_a_savepoint_is_released_and_the_transaction_then_rolls_back(
    sqlite_shop: Shop, naive: NaiveOutbox
) -> None:
    with Session(sqlite_shop.engine) as session, hooked(session, naive):
        session.begin()
        with session.begin_nested():
            session.add(Payment(id=1))
            naive.waiting.append("paid")
        session.rollback()

    assert naive.sent == ["paid"]
    assert sqlite_shop.payments() == []


def test_naive_after_commit_fires_while_the_transaction_around_the_session_is_open(
    sqlite_shop: Shop, naive: NaiveOutbox
) -> None:
    with sqlite_shop.engine.connect() as connection, connection.begin() as outer:
        with Session(connection) as session, hooked(session, naive):
            session.add(Payment(id=1))
            naive.waiting.append("paid")
            session.commit()
        outer.rollback()

    assert naive.sent == ["paid"]
    assert sqlite_shop.payments() == []


def test_naive_sql_in_after_commit_is_refused_and_the_caller_believes_that_the_commit_failed(
    sqlite_shop: Shop,
) -> None:
    with Session(sqlite_shop.engine) as session:
        event.listen(session, "after_commit", lambda one: one.execute(text("SELECT 1")))
        session.add(Payment(id=1))
        with pytest.raises(InvalidRequestError):
            session.commit()

    assert sqlite_shop.payments() == [1]


def test_naive_after_commit_fires_for_a_transaction_that_did_nothing(sqlite_shop: Shop, naive: NaiveOutbox) -> None:
    with Session(sqlite_shop.engine) as session, hooked(session, naive):
        session.begin()
        naive.waiting.append("nothing was done")
        session.commit()

    assert naive.sent == ["nothing was done"]


def test_naive_the_commit_event_of_the_engine_comes_before_the_commit(mysql_shop: Shop) -> None:
    seen_from_outside: list[list[int]] = []
    engine = mysql_shop.other_engine()
    event.listen(engine, "commit", lambda _connection: seen_from_outside.append(mysql_shop.payments()))

    with Session(engine) as session:
        session.add(Payment(id=1))
        session.commit()

    assert seen_from_outside == [[]]
    assert mysql_shop.payments() == [1]


def test_naive_session_events_know_nothing_of_transactions_without_a_session(
    sqlite_shop: Shop, naive: NaiveOutbox
) -> None:
    event.listen(Session, "after_commit", naive.send)
    try:
        naive.waiting.append("paid")
        with sqlite_shop.engine.begin() as connection:
            connection.execute(insert(Payment).values(id=1, note=""))
    finally:
        event.remove(Session, "after_commit", naive.send)

    assert naive.sent == []
    assert sqlite_shop.payments() == [1]


def test_naive_a_holder_for_each_thread_mixes_two_transactions_of_one_thread(mysql_shop: Shop) -> None:
    holder = threading.local()
    sent: list[str] = []

    def commit(session: Session) -> None:
        session.commit()
        sent.extend(holder.waiting)

    with Session(mysql_shop.engine) as one, Session(mysql_shop.engine) as other:
        holder.waiting = []
        one.add(Payment(id=1))
        holder.waiting.append("of one")
        other.add(Payment(id=2))
        holder.waiting.append("of the other")
        commit(one)
        other.rollback()

    assert sent == ["of one", "of the other"]
    assert mysql_shop.payments() == [1]


def test_two_transactions_of_one_thread_keep_their_messages_apart(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker, sender=BUSY_LIMITS)

    with Session(mysql_shop.engine) as one, Session(mysql_shop.engine) as other:
        one.add(Payment(id=1))
        box.publish("of-one", "", session=one)
        other.add(Payment(id=2))
        box.publish("of-the-other", "", session=other)
        one.commit()
        other.rollback()
    assert box.close(timeout_ms=120_000)

    assert broker.topics == ["of-one"]


def test_naive_events_of_mapped_classes_are_passed_over_by_bulk_statements(sqlite_shop: Shop) -> None:
    heard: list[int] = []

    def after_insert(_mapper: object, _connection: Connection, payment: Payment) -> None:
        heard.append(payment.id)

    event.listen(Payment, "after_insert", after_insert)
    try:
        with Session(sqlite_shop.engine) as session, session.begin():
            session.add(Payment(id=1))
            session.flush()
            session.execute(insert(Payment), [{"id": 2, "note": ""}])
            session.bulk_insert_mappings(Payment.__mapper__, [{"id": 3}])
    finally:
        event.remove(Payment, "after_insert", after_insert)

    assert heard == [1]
    assert sqlite_shop.payments() == [1, 2, 3]


def test_bulk_statements_and_messages_commit_together(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session, session.begin():
        session.execute(insert(Payment), [{"id": 1, "note": ""}])
        session.bulk_insert_mappings(Payment.__mapper__, [{"id": 2}])
        box.publish("bulk", "", session=session)
    assert box.close(timeout_ms=120_000)

    assert shop.payments() == [1, 2]
    assert broker.topics == ["bulk"]


def test_naive_a_hook_that_needs_a_second_connection_starves_at_the_size_of_the_pool(sqlite_shop: Shop) -> None:
    engine = sqlite_shop.other_engine(pool_size=1, max_overflow=0, pool_timeout=0.01)
    errors: list[BaseException] = []

    def acknowledge(_session: Session) -> None:
        try:
            with engine.connect():
                pass
        except PoolTimeoutError as error:
            errors.append(error)

    with Session(engine) as session:
        event.listen(session, "after_commit", acknowledge)
        session.add(Payment(id=1))
        session.commit()

    assert len(errors) == 1


def test_a_business_pool_of_one_connection_is_enough(mysql_shop: Shop, broker: RecordingBroker) -> None:
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0, pool_timeout=0.01)
    box = mysql_shop.box(broker, engine=engine)

    for number in range(3):
        with Session(engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish("topic", "", session=session)
            broker.wait_for(lambda one, sent=number: len(one.stored) >= sent)  # type: ignore[misc]
    assert box.close(timeout_ms=120_000)

    assert len(broker.ids) == 3
    assert mysql_shop.rows() == []
