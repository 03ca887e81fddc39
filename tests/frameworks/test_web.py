"""The guide's web applications: Flask with Flask-SQLAlchemy, FastAPI plain and async, on each database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import requests
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.ext.asyncio import create_async_engine

from tests.fixtures.databases import Database
from tests.frameworks.asgi_server import serving
from tests.frameworks.reached import Reached
from tests.outbox.shop import Shop

TOPIC = "payment.completed"
ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "mariadb": "mysql+asyncmy", "mysql": "mysql+asyncmy"}
Guide = Callable[[str], ModuleType]


def body(order_id: int) -> str:
    return f'{{"order_id":{order_id}}}'


def async_url(database: Database) -> str:
    return ASYNC_DRIVERS[database.name] + "://" + database.url.partition("://")[2]


@pytest.fixture(autouse=True)
def _only_ours(reached: Reached) -> None:
    reached.from_now_on(TOPIC)


@pytest.fixture
def flask_app(shop: Shop, broker_url: str, guide: Guide) -> Iterator[Flask]:
    """The guide's Flask application on the shop's database."""
    module = guide("flask_app")
    outbox = {"broker": broker_url, "schema": shop.database.schema}
    app: Flask = module.create_app({"SQLALCHEMY_DATABASE_URI": shop.database.url, "OUTBOX": outbox})
    yield app
    with app.app_context():
        module.db.engine.dispose()


def test_flask_sqlalchemy_sends_what_requests_commit_and_nothing_of_those_that_fail(
    shop: Shop, flask_app: Flask, reached: Reached
) -> None:
    client = flask_app.test_client()

    statuses = [
        client.post("/payments/1").status_code,
        client.post("/payments/2?declined=yes").status_code,
        client.post("/decorated/3").status_code,
        client.post("/payments/1").status_code,  # the row is there: the commit fails
        client.post("/payments/4").status_code,
    ]

    assert statuses == [201, 402, 201, 500, 201]
    assert flask_app.extensions["outbox"].close(timeout_ms=120_000)
    assert reached.bodies(TOPIC) == [body(1), body(3), body(4)]
    assert shop.payments() == [1, 3, 4]
    assert shop.rows() == []


def test_publishing_first_in_a_session_of_flask_begins_its_transaction(
    shop: Shop, flask_app: Flask, guide: Guide, reached: Reached, topic: str
) -> None:
    box = flask_app.extensions["outbox"]
    db = flask_app.extensions["sqlalchemy"]

    with flask_app.app_context():
        box.publish(topic, "1", session=db.session)
        db.session.commit()
        box.publish(topic, "2", session=db.session)
        db.session.rollback()
        with db.session.begin():
            box.publish(topic, "3", session=db.session)

    assert box.close(timeout_ms=120_000)
    assert reached.bodies(topic) == ["1", "3"]


def test_flask_with_two_databases_publishes_where_the_outbox_is(
    shop: Shop, broker_url: str, reached: Reached, topic: str, tmp_path: Path
) -> None:
    db = SQLAlchemy()

    class ShopPayment(db.Model):  # type: ignore[name-defined,misc]
        __tablename__ = "payment"
        __bind_key__ = "shop"
        id = db.Column(db.Integer, primary_key=True, autoincrement=False)
        note = db.Column(db.String(64), default="")

    app = Flask("two_databases")
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'other.db'}"
    app.config["SQLALCHEMY_BINDS"] = {"shop": shop.database.url}
    db.init_app(app)
    with app.app_context():
        box = shop.box(broker_url, engine=db.engines["shop"])
        for number in (1, 2):
            db.session.add(ShopPayment(id=number))
            box.publish(topic, str(number), session=db.session)
            db.session.commit() if number == 1 else db.session.rollback()
        assert box.close()
        for engine in db.engines.values():
            engine.dispose()

    assert reached.bodies(topic) == ["1"]
    assert shop.payments() == [1]
    assert shop.rows() == []


def test_a_plain_dependency_of_fastapi_commits_before_the_answer_and_rolls_back_with_an_error(
    shop: Shop, broker_url: str, guide: Guide, reached: Reached
) -> None:
    app = guide("fastapi_app").create_app(shop.engine, broker=broker_url, schema=shop.database.schema)

    with serving(app) as url:
        statuses = pay_all(url)

    assert statuses == [201, 402, 500, 201]
    assert reached.bodies(TOPIC) == [body(1), body(3)]
    assert shop.payments() == [1, 3]
    assert shop.rows() == []


def test_an_async_dependency_of_fastapi_does_the_same(
    shop: Shop, broker_url: str, guide: Guide, reached: Reached
) -> None:
    engine = create_async_engine(async_url(shop.database))
    app = guide("fastapi_async_app").create_app(engine, broker=broker_url, schema=shop.database.schema)

    with serving(app) as url:
        statuses = pay_all(url)
        decorated = post_all(url, "/decorated/5", "/decorated/5")

    assert statuses == [201, 402, 500, 201]
    assert decorated == [201, 500]
    assert reached.bodies(TOPIC) == [body(1), body(3), body(5)]
    assert shop.payments() == [1, 3, 5]
    assert shop.rows() == []


@pytest.mark.parametrize("module", ["fastapi_app", "fastapi_async_app"])
def test_a_commit_that_fails_is_no_success_to_the_client_of_fastapi(
    sqlite_shop: Shop, broker_url: str, guide: Guide, reached: Reached, module: str
) -> None:
    shop = sqlite_shop
    engine = create_async_engine(async_url(shop.database)) if "async" in module else shop.engine
    app = guide(module).create_app(engine, broker=broker_url)
    shop.tables.message.drop(shop.engine)  # the message's INSERT, just before the commit, will fail

    with serving(app) as url:
        statuses = post_all(url, "/payments/1")

    assert statuses == [500]
    assert shop.payments() == []
    assert reached.bodies(TOPIC) == []


def pay_all(url: str) -> list[int]:
    """One that commits, one that is declined, one whose row is there already, one that commits."""
    return post_all(url, "/payments/1", "/payments/2?declined=yes", "/payments/1", "/payments/3")


def post_all(url: str, *paths: str) -> list[int]:
    """The statuses of one POST after the other."""
    return [requests.post(url + path, timeout=60).status_code for path in paths]
