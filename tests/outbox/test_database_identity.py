"""Whether a session's connection reaches the outbox's tables: the database says it, by whatever way it was reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, select, text
from sqlalchemy.engine import URL
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.migrate import upgrade
from outbox.store.database_identity import DatabaseIdentity
from outbox_core.common.errors import ConfigurationError
from tests.fixtures.databases import Database
from tests.fixtures.local_server import LocalServer
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Payment, Shop, open_shop

Way = Callable[[URL, Path], Engine]


@pytest.fixture
def shops(mariadb: Database, request: pytest.FixtureRequest) -> Iterator[tuple[Shop, Shop]]:
    """Two services, each on a server of its own, with databases and tables of the same names."""
    server = request.getfixturevalue("shared_mysql")
    twin = Database(
        name="mysql", url=make_url(server.url).set(database=mariadb.business).render_as_string(hide_password=False),
        schema=mariadb.schema,
    )  # fmt: skip
    server.execute(f"CREATE DATABASE {twin.business}")
    try:
        with open_shop(mariadb) as one, open_shop(twin) as two:
            yield one, two
    finally:
        server.drop(twin)


def plainly(url: URL, _folder: Path) -> Engine:
    return create_engine(url)


def by_creator(url: URL, _folder: Path) -> Engine:
    return create_engine("mysql+pymysql://", creator=lambda: pymysql.connect(**parameters(url)))


def by_arguments(url: URL, _folder: Path) -> Engine:
    return create_engine(f"mysql+pymysql://db/{url.database}", connect_args=parameters(url))


def by_listener(url: URL, _folder: Path) -> Engine:
    engine = create_engine(f"mysql+pymysql://cluster/{url.database}")

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        options.update(parameters(url))

    return engine


def by_file(url: URL, folder: Path) -> Engine:
    file = folder / f"{url.port}.cnf"
    lines = [f"{name}={value}" for name, value in parameters(url).items() if name != "database"]
    file.write_text("\n".join(["[client]", *lines, ""]))
    return create_engine(f"mysql+pymysql:///{url.database}", connect_args={"read_default_file": str(file)})


def by_another_name(url: URL, _folder: Path) -> Engine:
    return create_engine(url.set(host="localhost"))


def parameters(url: URL) -> dict[str, Any]:
    return {
        "host": url.host, "port": url.port or 3306, "user": url.username, "password": url.password or "",
        "database": url.database,
    }  # fmt: skip


WAYS = [plainly, by_creator, by_arguments, by_listener, by_file]


def publish(box: Outbox, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Payment(id=1))
        box.publish("paid", "1", session=session)


@pytest.mark.mysql
@pytest.mark.parametrize("way", WAYS)
def test_a_session_on_another_server_is_refused_however_it_is_reached(
    shops: tuple[Shop, Shop], tmp_path: Path, way: Way
) -> None:
    one, two = shops
    engines = [way(make_url(shop.database.url), tmp_path) for shop in shops]
    box = one.box(RecordingBroker(), engine=engines[0], sender=NO_SENDER)

    with pytest.raises(ConfigurationError, match="another database"):
        publish(box, engines[1])

    for engine in engines:
        engine.dispose()
    assert one.payments() == two.payments() == []
    assert one.rows() == two.rows() == []


@pytest.mark.parametrize("way", [*WAYS, by_another_name])
def test_a_session_on_the_same_database_shares_it_however_it_is_reached(
    mysql_shop: Shop, tmp_path: Path, way: Way
) -> None:
    engine = way(make_url(mysql_shop.database.url), tmp_path)

    publish(mysql_shop.box(RecordingBroker(), sender=NO_SENDER), engine)

    engine.dispose()
    assert (mysql_shop.payments(), mysql_shop.row_topics()) == ([1], ["paid"])


def test_a_connection_is_asked_once_and_one_of_the_outbox_s_own_pool_never(mysql_shop: Shop) -> None:
    questions: list[str] = []
    engine = mysql_shop.other_engine(pool_size=1, max_overflow=0)
    identity = DatabaseIdentity(mysql_shop.engine, schema=mysql_shop.database.schema)
    with engine.connect() as connection:
        assert identity.is_of(connection)
    for one in (engine, mysql_shop.engine):
        with one.connect() as connection:
            before = asked(connection)
            for _ in range(5):
                assert identity.is_of(connection)
            questions.append(str(asked(connection) - before))

    assert questions == ["1", "1"]  # each the question itself


def asked(connection: Any) -> int:
    return int(connection.execute(text("SHOW SESSION STATUS LIKE 'Questions'")).one()[1])


def test_a_message_joins_a_copy_s_database_only_by_the_copy_s_own_outbox(mysql_shop: Shop) -> None:
    """A test's database beside the service's, on one server, with tables of its own."""
    business = f"{mysql_shop.database.business}_test"
    mysql_shop.execute(f"CREATE DATABASE {business}")
    engine = create_engine(make_url(mysql_shop.database.url).set(database=business))
    try:
        upgrade(engine)
        upgrade(mysql_shop.engine)
        box = mysql_shop.box(RecordingBroker(), schema=None, sender=NO_SENDER)
        with Session(engine) as session, session.begin():
            box.publish("paid", "", session=session)
        with mysql_shop.engine.connect() as connection:
            counts = [
                connection.scalar(text(f"SELECT COUNT(*) FROM {name}.outbox_message"))
                for name in (mysql_shop.database.business, business)
            ]
    finally:
        engine.dispose()
        mysql_shop.execute(f"DROP DATABASE {business}")

    assert counts == [1, 0]


def test_one_sqlite_file_is_one_database_by_whatever_path(sqlite_shop: Shop, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(Path(str(sqlite_shop.database.business)))
    engine = create_engine(f"sqlite:///{link}")

    publish(sqlite_shop.box(RecordingBroker(), sender=NO_SENDER), engine)

    engine.dispose()
    assert (sqlite_shop.payments(), sqlite_shop.row_topics()) == ([1], ["paid"])


def by_socket(server: LocalServer, database: Database) -> Engine:
    """By the file that the server listens on."""
    [(folder, name)] = server.execute("SELECT @@datadir, @@socket")
    socket = str(Path(folder) / name)
    return create_engine(f"mysql+pymysql://root@localhost/{database.business}", connect_args={"unix_socket": socket})


@pytest.mark.mysql
def test_a_server_s_socket_leads_to_its_database_and_another_server_s_does_not(
    mariadb_of_module: LocalServer, mysql_like_of_module: LocalServer
) -> None:
    with mariadb_of_module.fresh_database() as one:
        url = make_url(mysql_like_of_module.url).set(database=one.business)
        other = Database(name="mysql", url=url.render_as_string(hide_password=False), schema=one.schema)
        mysql_like_of_module.execute(f"CREATE DATABASE {other.business}")
        engines = [by_socket(mariadb_of_module, one), by_socket(mysql_like_of_module, other)]
        try:
            with open_shop(one) as shop, open_shop(other) as twin:
                box = shop.box(RecordingBroker(), sender=NO_SENDER)

                publish(box, engines[0])
                with pytest.raises(ConfigurationError, match="another database"):
                    publish(box, engines[1])

                assert (shop.payments(), shop.row_topics()) == ([1], ["paid"])
                assert twin.payments() == twin.rows() == []
        finally:
            for engine in engines:
                engine.dispose()
            mysql_like_of_module.drop(other)


# -- a follower has the same identity ----------------------------------------------------------------------------------


@pytest.fixture
def follower(mariadb: Database, mysql_like_of_module: LocalServer) -> Iterator[Shop]:
    """A server that reads, with a copy of the tables of `mariadb`: their id too."""
    url = make_url(mysql_like_of_module.url).set(database=mariadb.business)
    copy = Database(name="mysql", url=url.render_as_string(hide_password=False), schema=mariadb.schema)
    mysql_like_of_module.execute(f"CREATE DATABASE {copy.business}")
    try:
        with open_shop(copy) as shop:
            yield shop
    finally:
        mysql_like_of_module.execute("SET GLOBAL read_only = 0")
        mysql_like_of_module.drop(copy)


@pytest.mark.mysql
@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_a_session_that_routes_reads_to_a_follower_publishes_on_the_primary(
    mariadb: Database, follower: Shop, reads_first: bool, writes: bool
) -> None:
    with open_shop(mariadb) as primary:
        with primary.engine.connect() as connection:
            own = connection.scalar(select(primary.tables.identity.c.id))
        follower.execute(f"UPDATE {mariadb.schema}.identity SET id = '{own}'")
        follower.execute("SET GLOBAL read_only = 1")

        class RoutingSession(Session):
            def get_bind(self, *arguments: Any, bind: Any = None, **options: Any) -> Any:
                if bind is not None:
                    return bind
                return primary.engine if self._flushing else follower.engine

        box = primary.box(RecordingBroker(), sender=NO_SENDER)
        with RoutingSession(bind=follower.engine) as session, session.begin():
            if reads_first:
                session.execute(text("SELECT 1"))
            if writes:
                session.add(Payment(id=1))
            box.publish("paid", "1", session=session)

        assert primary.row_topics() == ["paid"]
        assert primary.payments() == ([1] if writes else [])
        assert follower.rows() == []
