"""Decorated functions where frameworks look at them: as endpoints, views, tasks and targets of processes."""

from __future__ import annotations

import inspect
import pickle

import pytest
import requests
from fastapi import FastAPI
from flask import Flask
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox
from tests.frameworks.asgi_server import serving
from tests.frameworks.reached import Reached
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import BUSY_LIMITS, Payment, Shop

box = Outbox("sqlite:///never-opened.db", broker=RecordingBroker())


@box.transactional
def module_level(session: Session, order_id: int, *, note: str = "") -> str:
    """What it says."""
    return f"{order_id} {note}"


@box.transactional
async def module_level_async(session: AsyncSession, order_id: int) -> None:
    """What it says."""


class Service:
    """Has a decorated method."""

    @box.transactional
    def pay(self, session: Session, order_id: int) -> int:
        return order_id


def test_its_signature_is_what_callers_pass() -> None:
    assert str(inspect.signature(module_level)) == "(order_id: 'int', *, note: 'str' = '') -> 'str'"
    assert list(inspect.signature(Service().pay).parameters) == ["order_id"]
    assert module_level.__doc__ == "What it says."
    assert module_level.__name__ == "module_level"


def test_frameworks_see_that_an_async_one_is_to_be_awaited() -> None:
    assert inspect.iscoroutinefunction(module_level_async.__call__)  # as starlette, FastAPI and anyio ask
    assert not inspect.iscoroutinefunction(module_level.__call__)


def test_it_is_pickled_by_its_name_as_functions_are() -> None:
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert pickle.loads(pickle.dumps(module_level_async)) is module_level_async


def test_it_is_an_endpoint_of_fastapi_as_it_stands(shop: Shop, broker_url: str, reached: Reached, topic: str) -> None:
    plain = shop.box(broker_url)
    app = FastAPI()

    @app.post("/payments/{order_id}", status_code=201)
    @plain.transactional
    def pay(session: Session, order_id: int, declined: bool = False) -> dict[str, int]:
        session.add(Payment(id=order_id))
        plain.publish(topic, str(order_id))
        if declined:
            raise LookupError
        return {"order_id": order_id}

    with serving(app) as url:
        answers = [requests.post(url + path, timeout=60) for path in ("/payments/1", "/payments/2?declined=yes")]

    assert [one.status_code for one in answers] == [201, 500]
    assert answers[0].json() == {"order_id": 1}
    assert plain.close()
    assert reached.bodies(topic) == ["1"]
    assert shop.payments() == [1]


def test_an_async_one_is_an_endpoint_of_fastapi_as_it_stands(
    sqlite_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    engine = create_async_engine(sqlite_shop.database.url.replace("sqlite://", "sqlite+aiosqlite://"))
    asynchronous = Outbox(engine, broker=broker_url, sender=BUSY_LIMITS)
    app = FastAPI()

    @app.post("/payments/{order_id}", status_code=201)
    @asynchronous.transactional
    async def pay(session: AsyncSession, order_id: int) -> dict[str, int]:
        await session.execute(insert(Payment).values(id=order_id, note=""))
        asynchronous.publish(topic, str(order_id))
        return {"order_id": order_id}

    @app.post("/end")
    async def end() -> None:
        await engine.dispose()

    with serving(app) as url:
        answers = [requests.post(url + path, timeout=60) for path in ("/payments/1", "/payments/1")]
        requests.post(f"{url}/end", timeout=60)

    assert [one.status_code for one in answers] == [201, 500]
    assert asynchronous.close()
    assert reached.bodies(topic) == ["1"]


def test_it_is_a_view_of_flask_as_it_stands(shop: Shop, broker_url: str, reached: Reached, topic: str) -> None:
    plain = shop.box(broker_url)
    app = Flask("decorated")

    @app.post("/payments/<int:order_id>")
    @plain.transactional
    def pay(session: Session, order_id: int) -> dict[str, int]:
        session.add(Payment(id=order_id))
        plain.publish(topic, str(order_id))
        return {"order_id": order_id}

    client = app.test_client()
    statuses = [client.post("/payments/1").status_code, client.post("/payments/1").status_code]

    assert statuses == [200, 500]
    assert plain.close()
    assert reached.bodies(topic) == ["1"]


@pytest.mark.parametrize("function", [module_level, Service().pay])
def test_the_session_is_nobodys_argument(function: object) -> None:
    assert callable(function)
    assert "session" not in inspect.signature(function).parameters
