"""What publish() is given at the edges: due times before 1970, delays, numbers that JSON lacks, sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from broker_adapter.http import HttpBroker
from outbox import Outbox
from outbox.store.databases.supported import database_of
from outbox_core import ManualClock
from outbox_core.common.errors import InvalidMessage
from outbox_core.messages.message import encode_body
from tests.broker_adapter.servers import served
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, NO_SENDER, Payment, Shop

NAN, INFINITY = float("nan"), float("inf")


@dataclass
class Position:
    """A body that is an object."""

    latitude: float


class Speed(Enum):
    """A body that is a member."""

    UNKNOWN = NAN


@pytest.mark.parametrize("moment", [datetime(1969, 12, 31, 23, 59, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)])
def test_a_due_time_before_1970_means_now(sqlite_shop: Shop, tmp_path: Path, moment: datetime) -> None:
    with served(tmp_path / "data") as server:
        broker = HttpBroker(server.url)
        box = sqlite_shop.box(broker)

        with Session(sqlite_shop.engine) as session, session.begin():
            box.publish("topic", "long due", deliver_at=moment, session=session)
        assert box.close(timeout_ms=120_000)
        [delivery] = broker.pull("topic", "group", wait_ms=10_000)
        broker.close()

    assert delivery.body == b"long due"
    assert sqlite_shop.rows() == []


@pytest.mark.parametrize("off_by", [timedelta(days=-400), timedelta(days=400)])
def test_a_delay_goes_by_the_databases_clock_in_the_row_and_in_the_send(
    shop: Shop, broker: RecordingBroker, off_by: timedelta
) -> None:
    delay = timedelta(hours=1)
    wrong = ManualClock(int((datetime.now(UTC) + off_by).timestamp() * 1000))
    box = shop.box(broker, clock=wrong)

    before_ms = database_ms(shop)
    with Session(shop.engine) as session, session.begin():
        box.publish("topic", "", session=session, delay=delay)
        box.publish("topic", "", session=session)
    after_ms = database_ms(shop)
    assert box.close(timeout_ms=120_000)

    archive = shop.tables.archive
    with shop.engine.connect() as connection:
        found = connection.execute(select(archive.c.id, archive.c.deliver_at_ms)).all()
    written = {row.id: row.deliver_at_ms for row in found}
    delayed, at_once = broker.stored
    assert before_ms + 3_600_000 <= written[delayed.id] <= after_ms + 3_600_001
    assert delayed.deliver_at_ms == written[delayed.id]
    assert at_once.deliver_at_ms is None
    assert written[at_once.id] is None


def database_ms(shop: Shop) -> int:
    """The database's clock."""
    with shop.engine.connect() as connection:
        return int(connection.scalar(select(database_of(connection.dialect).now_us())) or 0) // 1000


@pytest.mark.parametrize(
    ("delay", "ms"), [(timedelta(microseconds=1), 1), (timedelta(0), 0), (timedelta(seconds=-1), -1000)]
)
def test_a_delay_is_rounded_up_to_the_millisecond(
    sqlite_shop: Shop, broker: RecordingBroker, delay: timedelta, ms: int
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    before_ms = database_ms(sqlite_shop)
    with Session(sqlite_shop.engine) as session, session.begin():
        box.publish("topic", "", session=session, delay=delay)
    after_ms = database_ms(sqlite_shop)

    [row] = sqlite_shop.rows()
    assert before_ms + ms <= row["deliver_at_ms"] <= after_ms + ms + 1


def test_a_delay_longer_than_time_means_now_where_it_is_negative(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session, session.begin():
        box.publish("topic", "", session=session, delay=timedelta.min)

    assert [row["deliver_at_ms"] for row in sqlite_shop.rows()] == [0]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (NAN, r"\$ \(nan\)"),
        ([None, -INFINITY], r"\$\[1\] \(-inf\)"),
        ({"items": [{"price": 1.5}, {"price": INFINITY}]}, r"\$\.items\[1\]\.price \(inf\)"),
        ({"a": {"b": (1.0, NAN)}, "c": NAN}, r"\$\.a\.b\[1\] \(nan\)"),
        ({"where": Position(NAN)}, r"\$\.where\.latitude \(nan\)"),
        ([Speed.UNKNOWN], r"\$\[0\] \(nan\)"),
    ],
)
def test_a_number_that_json_does_not_know_is_refused_with_its_path(
    sqlite_shop: Shop, broker: RecordingBroker, body: object, path: str
) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with Session(sqlite_shop.engine) as session, session.begin(), pytest.raises(InvalidMessage, match=path):
        box.publish("topic", body, session=session)

    assert sqlite_shop.rows() == []


@pytest.mark.parametrize("body", [None, {"a": None}, ["null", 1.5, {"b": [None]}], {"nan": 0.0}])
def test_a_null_of_ones_own_is_no_number(body: object) -> None:
    encoded, _ = encode_body(body)

    assert b"nul" in encoded or b"nan" in encoded


@pytest.mark.parametrize("headers", ["ab", "", ["ab"], [("a", "b")], b"ab", 7])
def test_headers_that_are_no_mapping_are_refused(sqlite_shop: Shop, broker: RecordingBroker, headers: Any) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)

    with (
        Session(sqlite_shop.engine) as session,
        session.begin(),
        pytest.raises(InvalidMessage, match="the headers must be a mapping of names to values"),
    ):
        box.publish("topic", "", headers=headers, session=session)

    assert sqlite_shop.rows() == []


@pytest.mark.parametrize("call", ["publish", "cancel"])
def test_a_session_that_has_not_begun_begins_with_its_first_message(
    shop: Shop, broker: RecordingBroker, call: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        for number in range(2):
            box.publish("t", "", session=session) if call == "publish" else box.cancel("m-1", session=session)
            session.add(Payment(id=number))
            session.commit()
        box.publish("closed", "", session=session)

    assert len(shop.rows()) == 2
    assert shop.payments() == [0, 1]


def test_an_async_scoped_session_is_taken_for_the_session_behind_it(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    async def job() -> None:
        engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
        box = Outbox(engine, broker=broker, sender=BUSY_LIMITS)
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        box.publish("sent", "", session=scoped)
        await scoped.commit()
        box.publish("rolled.back", "", session=scoped)
        await scoped.rollback()
        await scoped.remove()
        assert await asyncio.to_thread(box.close, timeout_ms=120_000)
        await engine.dispose()

    asyncio.run(job())

    assert broker.topics == ["sent"]
    assert sqlite_shop.rows() == []
