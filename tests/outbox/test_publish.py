"""What publish() refuses, what it costs, and what it never does to the business call."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import ConfigurationError, DuplicateMessageId, InvalidMessage, NoTransaction, Outbox, SenderLimits
from outbox_core import ManualClock
from outbox_core.common.errors import BrokerUnavailable
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.refused_topics import refuse_topics
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
WAIT_SECONDS = 300


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """The statements that an engine sends while the block runs."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def test_publish_does_no_io_and_the_commit_writes_one_insert(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    with Session(shop.engine) as session, session.begin():  # it asks once to whom the schema belongs
        box.publish("first", "", session=session)

    with Session(shop.engine) as session, statements(shop.engine) as seen:
        session.begin()
        for number in range(100):
            box.publish("topic", {"number": number}, session=session)
        before_commit = list(seen)
        session.commit()

    inserts = [one for one in seen if one.startswith("INSERT")]
    assert before_commit == []
    assert len(inserts) == 1
    assert [one for one in seen if one not in inserts] in ([], ["BEGIN", "ROLLBACK", "BEGIN IMMEDIATE"])
    assert len(shop.rows()) == 101


def test_a_transaction_that_publishes_nothing_costs_no_statement_of_ours(shop: Shop, broker: RecordingBroker) -> None:
    shop.box(broker)

    with Session(shop.engine) as session, statements(shop.engine) as seen:
        session.add(Payment(id=1))
        session.commit()

    assert [one for one in seen if "message" in one] == []
    assert len([one for one in seen if one.startswith("INSERT INTO payment")]) == 1


def test_many_messages_are_written_in_statements_of_bounded_size(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session, statements(sqlite_shop.engine) as seen, session.begin():
        for _ in range(9):
            box.publish("large", b"x" * 1024 * 1024, session=session)

    assert len([one for one in seen if one.startswith("INSERT")]) == 3
    assert len(sqlite_shop.rows()) == 9


def test_making_an_outbox_and_publishing_starts_no_thread(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    before = set(threading.enumerate())
    box = sqlite_shop.box(broker)

    with Session(sqlite_shop.engine) as session:
        session.begin()
        box.publish("topic", "", session=session)
        started_by_publish = set(threading.enumerate()) - before
        session.commit()
    started_by_commit = {thread.name for thread in set(threading.enumerate()) - before}

    assert started_by_publish == set()
    assert started_by_commit == {"outbox-sender"}


def test_publish_outside_a_transaction_is_refused_with_the_cure(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker)

    with pytest.raises(NoTransaction, match=r"@box\.transactional"):
        box.publish("topic", "")
    with pytest.raises(NoTransaction, match=r"@box\.transactional"):
        box.cancel("some-id")
    with pytest.raises(NoTransaction, match="not str"):
        box.publish("topic", "", session="session")  # type: ignore[arg-type]


def test_a_context_inherited_from_a_finished_function_is_no_transaction(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box = sqlite_shop.box(broker)
    inherited: list[contextvars.Context] = []

    @box.transactional
    def pay(_session: Session) -> None:
        inherited.append(contextvars.copy_context())

    pay()

    with pytest.raises(NoTransaction):
        inherited[0].run(box.publish, "topic", "")
    with pytest.raises(NoTransaction):
        box.publish("topic", "")


def test_a_thread_has_no_part_in_the_transaction_of_the_thread_that_started_it(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)
    refused: list[bool] = []

    def elsewhere() -> None:
        try:
            box.publish("elsewhere", "")
        except NoTransaction:
            refused.append(True)

    @box.transactional
    def pay(_session: Session) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        box.publish("here", "")

    pay()

    assert refused == [True]
    assert sqlite_shop.row_topics() == ["here"]


def test_a_task_that_outlives_the_function_has_no_transaction(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    async def late() -> None:
        box.publish("late", "")

    async def main() -> list[BaseException | None]:
        @box.transactional
        def pay(_session: Session) -> asyncio.Task[None]:
            box.publish("in.time", "")
            return asyncio.get_running_loop().create_task(late())

        return await asyncio.gather(pay(), return_exceptions=True)

    [error] = asyncio.run(main())

    assert isinstance(error, NoTransaction)
    assert sqlite_shop.row_topics() == ["in.time"]


def test_an_async_session_publishes_with_its_commit(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    engine = create_async_engine(sqlite_shop.database.url.replace("sqlite:", "sqlite+aiosqlite:"))
    box = sqlite_shop.box(broker, engine=engine)

    async def pay(number: int, *, fails: bool) -> None:
        async with AsyncSession(engine) as session:
            session.add(Payment(id=number))
            box.publish("paid", str(number), session=session)
            await session.flush()
            if fails:
                await session.rollback()
            await session.commit()

    async def main() -> None:
        await pay(1, fails=False)
        await pay(2, fails=True)
        await engine.dispose()

    asyncio.run(main())

    broker.wait_for(lambda it: [message.body for message in it.stored] == [b"1"])
    assert box.close()
    assert sqlite_shop.payments() == [1]
    assert sqlite_shop.rows() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"topic": "../x"}, "topic"),
        ({"topic": ""}, "topic"),
        ({"topic": ".."}, "topic"),
        ({"topic": "x" * 256}, "topic"),
        ({"topic": "naïve"}, "topic"),
        ({"topic": 7}, "topic"),
        ({"body": b"x" * 1025}, "more than the 1,024 that body_bytes_max allows"),
        ({"body": {"when": object()}}, "cannot be written as JSON"),
        ({"body": "\ud800"}, "UTF-8"),
        ({"body": {"text": "\ud800"}}, "cannot be written as JSON"),
        ({"key": "\ud800"}, "the key cannot be written as UTF-8"),
        ({"key": ""}, "the key has 0 bytes"),
        ({"key": "ä" * 513}, "the key has 1,026 bytes"),
        ({"key": 7}, "the key must be a str"),
        ({"headers": {"a b": "x"}}, "header name"),
        ({"headers": {"a": "\ud800"}}, "header a cannot be written as UTF-8"),
        ({"headers": {"a": 1}}, "header a must be a str"),
        ({"headers": {str(number): "" for number in range(65)}}, "headers are more than the 64 allowed"),
        ({"message_id": "a/b"}, "message id"),
        ({"message_id": ""}, "message id"),
        ({"deliver_at": NOON.replace(tzinfo=None)}, "naive"),
        ({"deliver_at": 1_900_000_000}, "deliver_at must be a datetime"),
        ({"delay": 5}, "delay must be a timedelta"),
        ({"deliver_at": NOON, "delay": timedelta(1)}, "not both"),
        ({"deliver_at": NOON + timedelta(days=3 * 365)}, "at most 731 days"),
        ({"delay": timedelta.max}, "at most 731 days"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_breaks_a_bound_is_refused_and_nothing_is_written(
    sqlite_shop: Shop, broker: RecordingBroker, arguments: dict[str, Any], says: str
) -> None:
    clock = ManualClock(int(NOON.timestamp() * 1000))
    box = sqlite_shop.box(broker, sender=NO_SENDER, body_bytes_max=1024, clock=clock)

    with Session(sqlite_shop.engine) as session, session.begin(), pytest.raises(InvalidMessage, match=says):
        box.publish(**{"topic": "topic", "body": "", **arguments}, session=session)

    assert sqlite_shop.rows() == []


@pytest.mark.parametrize(
    ("arguments", "deliver_at_ms"),
    [
        ({"deliver_at": NOON + timedelta(days=731)}, 731 * 86_400_000),
        ({"deliver_at": NOON - timedelta(seconds=1)}, -1000),
        ({"deliver_at": NOON + timedelta(microseconds=1)}, 1),
        ({"deliver_at": (NOON + timedelta(hours=1)).astimezone()}, 3_600_000),
    ],
)
def test_a_due_time_is_kept_to_the_millisecond_and_never_early(
    sqlite_shop: Shop, broker: RecordingBroker, arguments: dict[str, Any], deliver_at_ms: int
) -> None:
    noon_ms = int(NOON.timestamp() * 1000)
    box = sqlite_shop.box(broker, sender=NO_SENDER, clock=ManualClock(noon_ms))

    with Session(sqlite_shop.engine) as session, session.begin():
        box.publish("topic", "", session=session, **arguments)

    [row] = sqlite_shop.rows()
    assert row["deliver_at_ms"] == noon_ms + deliver_at_ms


@pytest.mark.parametrize("body", [b"\x00\xff\n", "", "Grüße 🛫", {"a": [1, None, "😀"]}, b"x" * 1_000_000])
def test_every_body_comes_through_the_table_as_it_went_in(shop: Shop, broker: RecordingBroker, body: object) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session, session.begin():
        made = box.publish("topic", body, key="Schlüssel 🔑", headers={"x": "Grüße 🛫"}, session=session)
    shop.end_leases()
    shop.scan(broker).run()

    [sent] = broker.stored
    assert (sent.id, sent.topic, sent.body, sent.key) == (made.id, made.topic, made.body, made.key)
    assert dict(sent.headers) == dict(made.headers)


def test_a_message_id_used_twice_fails_the_commit_and_rolls_back(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    def pay(number: int) -> None:
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish("topic", "", message_id="order-1", session=session)

    pay(1)
    with pytest.raises(DuplicateMessageId, match="order-1 was published before, and that message is not sent yet"):
        pay(2)

    assert shop.payments() == [1]
    assert len(shop.rows()) == 1


def test_a_message_that_the_database_refuses_for_another_reason_is_not_called_a_duplicate(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)
    refuse_topics(shop, "message")

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("topic", "", session=session)
        with pytest.raises(IntegrityError):
            session.commit()

    assert (shop.payments(), shop.rows()) == ([], [])


def test_an_error_of_the_insert_shows_nothing_of_the_messages(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        for _ in range(2):
            box.publish("topic", "hush", key="quiet", message_id="same", session=session)
        with pytest.raises(DuplicateMessageId) as caught:
            session.commit()
    told = "".join(traceback.format_exception(caught.value.__cause__))

    assert "IntegrityError" in told
    assert not re.search(f"hush|quiet|{b'hush'.hex()}|{b'quiet'.hex()}", told)


def test_a_refused_commit_stays_refused_when_it_is_tried_again(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        box.publish("topic", "", message_id="twice", session=session)
        box.publish("topic", "", message_id="twice", session=session)
        for _ in range(2):
            with pytest.raises(DuplicateMessageId, match="twice is published twice in this transaction"):
                session.commit()
        session.rollback()

    assert (shop.payments(), shop.rows()) == ([], [])


def test_an_id_published_again_after_it_was_sent_is_dropped_by_the_broker(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session, session.begin():
        box.publish("topic", "", message_id="order-1", session=session)
    assert box.close()
    again = shop.box(broker)
    with Session(shop.engine) as session, session.begin():
        again.publish("topic", "", message_id="order-1", session=session)
    assert again.close()

    assert broker.ids == ["order-1"]
    assert broker.duplicates == ["order-1"]


def test_a_broker_that_raises_never_reaches_the_business_call(shop: Shop) -> None:
    class Defect(Exception):
        """Not one of ours."""

    def rule(_batch: object) -> None:
        raise Defect if len(broker.batches) == 1 else BrokerUnavailable("down")

    broker = RecordingBroker(rule)
    box = shop.box(broker)

    for number in (1, 2):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish(f"topic.{number}", "", session=session)
        broker.wait_for(lambda it, calls=number: len(it.batches) == calls)
    box.close()

    assert shop.payments() == [1, 2]
    assert sorted(shop.row_topics()) == ["topic.1", "topic.2"]


def test_a_full_queue_drops_the_send_and_keeps_the_row(shop: Shop) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang(_batch: object) -> None:
        entered.set()
        go_on.wait(WAIT_SECONDS)

    broker = RecordingBroker(hang)
    box = shop.box(broker, sender=replace(BUSY_LIMITS, queue_rows_max=2))

    for number in range(5):
        with Session(shop.engine) as session, session.begin():
            session.add(Payment(id=number))
            box.publish(f"topic.{number}", "", session=session)
        assert entered.wait(WAIT_SECONDS)
    waiting = shop.row_topics()
    go_on.set()
    box.close()

    assert shop.payments() == [0, 1, 2, 3, 4]
    assert sorted(waiting) == [f"topic.{number}" for number in range(5)]
    assert broker.topics == ["topic.0", "topic.1", "topic.2"]
    assert sorted(shop.row_topics()) == ["topic.3", "topic.4"]


@pytest.mark.parametrize("propagation", ["sometimes", "REQUIRED", ""])
def test_an_unknown_propagation_is_refused_where_it_is_written(
    sqlite_shop: Shop, broker: RecordingBroker, propagation: str
) -> None:
    box = sqlite_shop.box(broker)

    with pytest.raises(ConfigurationError, match="required, requires_new or nested"):
        box.transactional(propagation=propagation)


def test_a_caller_that_brings_the_session_itself_is_told_not_to(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    @box.transactional
    def pay(session: Session, number: int) -> None:
        session.add(Payment(id=number))

    @box.transactional
    def audit(session: Session, other: Session) -> bool:
        return session is not other

    with Session(shop.engine) as session:
        with pytest.raises(TypeError, match=r"pay\(\) gets its session from @box\.transactional: call it without one"):
            pay(session, 1)  # type: ignore[call-arg, arg-type]
        assert audit(session), "a function that has a parameter for another session gets it"

    assert shop.payments() == []


def test_generators_whose_bodies_run_after_the_call_cannot_be_transactional(
    sqlite_shop: Shop, broker: RecordingBroker
) -> None:
    box = sqlite_shop.box(broker)

    def generator(_session: Session) -> Iterator[int]:
        yield 1

    async def async_generator(_session: Session) -> Any:
        yield 1

    for function in (generator, async_generator):
        with pytest.raises(ConfigurationError, match=function.__name__):
            box.transactional(function)


def test_methods_get_the_session_behind_self(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    class Till:
        @box.transactional
        def pay(self, session: Session, number: int) -> int:
            session.add(Payment(id=number))
            box.publish("paid", "")
            return number

    assert Till().pay(5) == 5
    assert sqlite_shop.payments() == [5]


def as_python_3_13_binds(owner: type, name: str) -> Any:
    """A class method as that version makes it: a method of the decorated object, whose `__get__` is not asked."""
    found = next(vars(one)[name] for one in owner.__mro__ if name in vars(one))
    return MethodType(found.__func__, owner)


@pytest.mark.parametrize("bound", [getattr, as_python_3_13_binds])
def test_class_methods_get_the_session_behind_the_class(
    sqlite_shop: Shop, broker: RecordingBroker, bound: Callable[[type, str], Any]
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    class Till:
        @classmethod
        @box.transactional
        def pay(cls, session: Session, number: int) -> type:
            session.add(Payment(id=number))
            return cls

    class Register(Till):
        """Inherits it."""

    assert bound(Till, "pay")(5) is Till
    assert bound(Register, "pay")(number=6) is Register
    assert list(inspect.signature(bound(Till, "pay")).parameters) == ["number"]
    assert sqlite_shop.payments() == [5, 6]


@pytest.mark.parametrize("bound", [getattr, as_python_3_13_binds])
def test_async_class_methods_get_the_session_behind_the_class(
    sqlite_shop: Shop, broker: RecordingBroker, bound: Callable[[type, str], Any]
) -> None:
    engine = create_async_engine(sqlite_shop.database.url.replace("sqlite:", "sqlite+aiosqlite:"))
    box = sqlite_shop.box(broker, engine=engine, sender=NO_SENDER)

    class Till:
        @classmethod
        @box.transactional
        async def pay(cls, session: AsyncSession, number: int) -> type:
            session.add(Payment(id=number))
            return cls

    async def paid() -> type:
        try:
            return await bound(Till, "pay")(5)  # type: ignore[no-any-return]
        finally:
            await engine.dispose()

    assert asyncio.run(paid()) is Till
    assert sqlite_shop.payments() == [5]


def test_a_class_that_is_an_argument_stays_one(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    @box.transactional
    def pay(session: Session, model: type[Payment]) -> None:
        session.add(model(id=7))

    pay(Payment)

    assert sqlite_shop.payments() == [7]


def test_a_session_on_another_database_is_refused_at_its_commit(
    sqlite_shop: Shop, broker: RecordingBroker, tmp_path: Path
) -> None:
    box = sqlite_shop.box(broker)
    other = Outbox(f"sqlite:///{tmp_path / 'other.db'}", broker=broker)

    with Session(other.engine) as session, session.begin():
        box.publish("topic", "", session=session)
        with pytest.raises(ConfigurationError, match="another database"):
            session.commit()
        session.rollback()

    other.engine.dispose()
    other.close()
    assert sqlite_shop.rows() == []


def test_an_autocommit_engine_is_refused(mysql_shop: Shop, broker: RecordingBroker) -> None:
    engine = mysql_shop.other_engine(isolation_level="AUTOCOMMIT")
    box = mysql_shop.box(broker, engine=engine)

    with Session(engine) as session:
        session.begin()
        box.publish("topic", "", session=session)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.commit()
        session.rollback()

    assert mysql_shop.rows() == []


def test_sqlite_has_real_transactions_even_on_an_autocommit_engine(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    engine = sqlite_shop.other_engine(isolation_level="AUTOCOMMIT")
    box = sqlite_shop.box(broker, engine=engine, sender=NO_SENDER)

    with Session(engine) as session:
        session.add(Payment(id=1))
        session.flush()
        box.publish("rolled.back", "", session=session)
        session.rollback()
        session.add(Payment(id=2))
        box.publish("committed", "", session=session)
        session.commit()

    assert sqlite_shop.payments() == [2]
    assert sqlite_shop.row_topics() == ["committed"]


def test_an_autocommit_connection_is_refused(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        session.begin()
        box.publish("topic", "", session=session)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.commit()
        session.rollback()

    assert shop.rows() == []


def test_a_lease_that_is_not_longer_than_its_margin_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lease_margin_ms"):
        SenderLimits(lease_ms=1_000)

    assert BUSY_LIMITS.lease_margin_ms < BUSY_LIMITS.lease_ms
