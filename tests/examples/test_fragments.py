"""The short Python blocks of README and guides, run with what they take for granted already there. Whole programs are
run elsewhere: first-hour, testing, frameworks and examples have tests of their own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, connect, consumer, run_consumers
from outbox.consumers.consumer_runner import ConsumerRunner
from outbox.migrate import upgrade
from outbox.migrate.schema_upgrade import current, head
from tests.broker_adapter.servers import served
from tests.fixtures.databases import Database

ROOT = Path(__file__).parents[2]
ADDRESSES = ("http://broker:7788", "http://127.0.0.1:7788")


class Base(DeclarativeBase): ...


class Ticket(Base):
    __tablename__ = "ticket"
    order_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@dataclass(frozen=True, slots=True)
class Shop:
    """A database with tables, an Outbox whose broker is in memory, and the names that fragments use."""

    engine: Engine
    box: Outbox
    names: dict[str, Any]

    def run(self, block: str) -> dict[str, Any]:
        """The block's names after it has run. A service that would run for ever is stopped as soon as it runs."""
        for address in ADDRESSES:
            block = block.replace(address, str(self.names["url"]))
        names = dict(self.names)
        exec(compile(block.replace("{...}", "{}").replace(".run_until_signal()", ".stop()"), "block", "exec"), names)
        return names


@contextmanager
def opened(database: Database) -> Iterator[Shop]:
    """The shop on a fresh database."""
    engine = create_engine(database.url)
    upgrade(engine, schema=database.schema)
    Base.metadata.create_all(engine)
    url = f"memory://{secrets.token_hex(4)}"
    outbox = partial(Outbox, schema=database.schema)
    broker = connect(url)
    box = outbox(engine, broker=broker)
    names = {
        "Outbox": outbox, "Ticket": Ticket, "box": box, "connect": connect, "consumer": consumer, "engine": engine,
        "run_consumers": run_consumers, "timedelta": timedelta, "departure": datetime.now(UTC) + timedelta(days=9),
        "url": url, "create_async_engine": create_async_engine,
    }  # fmt: skip
    try:
        yield Shop(engine, box, names)
    finally:
        box.close()
        broker.close()
        engine.dispose()


@pytest.fixture
def shop(sqlite: Database) -> Iterator[Shop]:
    """On SQLite."""
    with opened(sqlite) as made:
        yield made


def block(page: str, *, with_words: str) -> str:
    """The one Python block of a page with these words in it."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    [only] = [one for one in found if with_words in one]
    return str(only)


@pytest.mark.mariadb
@pytest.mark.parametrize(("page", "words"), [("README.md", "box.begin"), ("docs/guides/delay.md", "box.cancel")])
def test_the_ways_to_publish_publish_schedule_and_cancel(mariadb: Database, page: str, words: str) -> None:
    with opened(mariadb) as shop:

        @shop.box.transactional
        def run(session: Session) -> None:
            message = shop.box.publish("canceled", {}, delay=timedelta(days=90))
            shop.names.update(session=session, message=message, message_id=message.id)
            shop.run(block(page, with_words=words))

        run()
        shop.box.close()

        scheduled = {
            topic: shop.box.broker.admin.figures(topic)["scheduled"] for topic in ("canceled", "trip.reminder")
        }
    assert scheduled == {"canceled": 0, "trip.reminder": 1}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/guides/consuming.md"])
def test_the_consumer_of_the_documents_issues_a_ticket(shop: Shop, page: str) -> None:
    shop.names["run_consumers"] = lambda consumers, *, broker: ConsumerRunner(consumers, broker=broker)  # not started
    names = shop.run(block(page, with_words="run_consumers"))
    shop.box.broker.publish([Message(id="1", topic="payment.completed", body=b'{"order_id": 17}')])

    [delivery] = shop.box.broker.pull("payment.completed", "by-hand")
    names["issue_ticket"].handle(delivery)

    with Session(shop.engine) as session:
        assert [ticket.order_id for ticket in session.scalars(select(Ticket))] == [17]


def test_the_asynchronous_consumer_of_the_documents_is_one(shop: Shop) -> None:
    shop.names["url"] = shop.engine.url.set(drivername="sqlite+aiosqlite")

    names = shop.run(block("docs/guides/consuming.md", with_words="async def tell"))

    assert names["tell"].topics == ("payment.completed", "payment.refunded")
    assert names["tell"].is_async


def test_a_group_is_declared_with_the_filter_of_the_guide(tmp_path: Path) -> None:
    declared = block("docs/guides/filters.md", with_words="declare_group")
    with served(tmp_path / "data") as server, closing(connect(server.url)) as broker:
        exec(compile(declared.replace(ADDRESSES[1], server.url), "block", "exec"), {})
        for kind, amount in {"order.paid": "101", "order.made": "102", "order.kept": "1"}.items():
            broker.publish([Message(id=kind, topic="orders", body=b"", headers={"type": kind, "amount": amount})])

        assert [one.id for one in broker.pull("orders", "billing")] == ["order.paid"]


@pytest.mark.slow
def test_the_guides_telemetry_counts_what_is_published(shop: Shop) -> None:
    served: list[prometheus_client.CollectorRegistry] = []
    shop.names["issue_ticket"] = shop.run(block("README.md", with_words="@consumer"))["issue_ticket"]
    shop.names["prometheus_client"] = SimpleNamespace(
        start_http_server=lambda _port, *, registry: served.append(registry)
    )

    names = shop.run(block("docs/guides/observability.md", with_words="OutboxMetrics"))
    with names["box"] as box, Session(shop.engine) as session, session.begin():
        box.publish("payment.completed", {}, session=session)
    names["runner"].stop()

    labels = {"topic": "payment.completed"}
    assert [one.get_sample_value("outbox_messages_enqueued_total", labels) for one in served] == [1]


def test_the_guides_cloud_event_has_its_type_and_source(shop: Shop) -> None:
    names = shop.run(block("docs/guides/observability.md", with_words="CloudEvents(").rpartition("box.publish(")[0])

    with names["box"] as box, Session(shop.engine) as session, session.begin():
        message = box.publish("payment.completed", {"order_id": 1}, key="1", session=session)

    assert message.headers["ce-type"] == "com.example.payment.completed"
    assert message.headers["ce-source"] == "/shop"


def test_an_alembic_revision_of_ones_own_upgrades_the_outbox(mariadb: Database) -> None:
    revision = block("README.md", with_words="upgrade_outbox")
    engine = create_engine(mariadb.url)
    try:
        with engine.begin() as connection:
            names: dict[str, Any] = {"op": SimpleNamespace(get_bind=lambda: connection)}
            exec(compile(revision, "revision", "exec"), names)
            names["upgrade"]()
            reached = current(connection)
    finally:
        engine.dispose()

    assert reached == head()
