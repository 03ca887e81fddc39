"""A switch-over by DNS: the demoted primary answers on, read-only, and only new connections find the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from compensator.work.engines import InstanceEngines
from outbox.store.async_background import transact
from outbox.store.database import background_engine, is_read_only, open_engine
from tests.fixtures.local_server import LocalServer
from tests.outbox.shop import Payment, Shop
from tests.traps.switchable_shop import USER, switchable_shop


@dataclass(slots=True)
class Primary:
    """One server in two roles: USER meets it as the demoted primary, a user with all privileges as the new one."""

    shop: Shop
    server: LocalServer

    def switch_over(self) -> None:
        """From now on the connections of USER are refused every write."""
        self.server.execute("SET GLOBAL read_only = 1")

    def url(self, user: str = USER) -> str:
        """The database's URL for a user."""
        return make_url(self.shop.database.url).set(username=user).render_as_string(hide_password=False)


@pytest.fixture
def primary(mysql_like_of_module: LocalServer) -> Iterator[Primary]:
    """A primary, and a user whom read_only applies to."""
    with switchable_shop(mysql_like_of_module) as shop:
        yield Primary(shop, mysql_like_of_module)


@dataclass(slots=True)
class Resolver:
    """Connects where the name leads now, as a new connection does after a change of DNS."""

    primary: Primary
    user: str = USER

    def connect(self) -> object:
        """A connection of the driver."""
        dialect = make_url(self.primary.url(self.user)).get_dialect()()
        arguments, named = dialect.create_connect_args(make_url(self.primary.url(self.user)))
        return dialect.import_dbapi().connect(*arguments, **named)


def insert(number: int) -> Callable[[Connection], object]:
    """The write of one business row."""
    statement = text("INSERT INTO payment (id, note) VALUES (:id, '')")
    return lambda connection: connection.execute(statement, {"id": number})


def assert_refused(engine: Engine, number: int) -> None:
    """The server refuses the write, since it is read-only."""
    with pytest.raises(DBAPIError) as refused:
        transact(engine, insert(number))
    assert is_read_only(refused.value)


def test_background_connections_leave_a_primary_that_became_read_only(primary: Primary) -> None:
    resolver = Resolver(primary)
    engine = create_engine(primary.url(), creator=resolver.connect, pool_pre_ping=True)
    background = background_engine(engine)
    primary.shop.closing.callback(background.dispose)
    with background.connect() as one, background.connect() as other:  # two in the pool
        insert(1)(one)
        one.commit()
        other.execute(text("SELECT 1"))

    primary.switch_over()
    resolver.user = "root"
    assert_refused(background, 2)
    with background.connect() as one, background.connect() as other:
        for number, connection in ((3, one), (4, other)):
            insert(number)(connection)
            connection.commit()

    assert primary.shop.payments() == [1, 3, 4]


def test_connections_of_a_url_leave_a_primary_that_became_read_only(primary: Primary) -> None:
    engine = open_engine(primary.url())
    primary.shop.closing.callback(engine.dispose)
    before = connection_id(engine)
    assert connection_id(engine) == before, "the connection is pooled"

    primary.switch_over()
    with Session(engine) as session:
        session.add(Payment(id=1))
        with pytest.raises(DBAPIError):
            session.commit()

    assert connection_id(engine) != before


def test_an_error_that_is_no_switch_over_keeps_the_connection(primary: Primary) -> None:
    engine = open_engine(primary.url())
    primary.shop.closing.callback(engine.dispose)
    before = connection_id(engine)

    with pytest.raises(DBAPIError), engine.begin() as connection:
        connection.execute(text("SELECT no_such_column FROM payment"))

    assert connection_id(engine) == before


def test_what_a_compensator_only_reads_by_is_reconnected_after_a_time(primary: Primary) -> None:
    engines = InstanceEngines(primary.url(), reads_recycle_seconds=0)
    primary.shop.closing.callback(engines.close)

    seen = {connection_id(engines.reads) for _ in range(2)}

    assert len(seen) == 2


def connection_id(engine: Engine) -> int:
    """The server's number of the connection that the pool gives."""
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT CONNECTION_ID()")) or 0)
