"""Transactions that somebody ends below the Session: by its Connection, by a statement, on a second server."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox_core.common.errors import ConfigurationError, NoTransaction
from tests.fixtures.databases import Database
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import NO_SENDER, Base, Payment, Shop, open_shop

Bind = Callable[[Connection, Engine], Session]


class Declined(Exception):
    """The business says no."""


class BoundSession(Session):
    """Everything goes to one Connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def get_bind(self, *_: Any, **__: Any) -> Connection:
        return self._connection


def bind_mapper(connection: Connection, _engine: Engine) -> Session:
    session = Session()
    session.bind_mapper(Payment, connection)
    return session


BINDS: dict[str, Bind] = {
    "bind": lambda connection, _engine: Session(connection),
    "binds": lambda connection, _engine: Session(binds={Payment: connection}),
    "binds of a base class": lambda connection, _engine: Session(binds={Base: connection}),
    "binds beside an engine": lambda connection, engine: Session(engine, binds={Payment: connection}),
    "bind_mapper": bind_mapper,
    "get_bind": lambda connection, _engine: BoundSession(connection),
}


@pytest.fixture(params=BINDS)
def bind(request: pytest.FixtureRequest) -> Bind:
    """A way to bind a Session's class to an open Connection."""
    return BINDS[request.param]


def pay(box: Outbox, session: Session, number: int = 1) -> None:
    """A payment and its message, all but the commit."""
    session.add(Payment(id=number))
    session.flush()
    box.publish(f"paid.{number}", "", session=session)


def sent_and_closed(box: Outbox, broker: RecordingBroker) -> list[str]:
    """What was sent in the end."""
    assert box.close(timeout_ms=120_000)
    return broker.topics


def test_nothing_is_sent_before_the_connection_that_a_class_is_bound_to_commits(
    sqlite_shop: Shop, broker: RecordingBroker, bind: Bind
) -> None:
    box = sqlite_shop.box(broker)

    with sqlite_shop.engine.connect() as connection:
        outer = connection.begin()
        with bind(connection, sqlite_shop.engine) as session:
            pay(box, session)
            session.commit()
        outer.rollback()

    assert sent_and_closed(box, broker) == []
    assert (sqlite_shop.payments(), sqlite_shop.rows()) == ([], [])


def test_what_an_outer_transaction_held_back_is_sent_when_its_connection_commits(
    sqlite_shop: Shop, broker: RecordingBroker, bind: Bind
) -> None:
    box = sqlite_shop.box(broker)

    with sqlite_shop.engine.connect() as connection:
        outer = connection.begin()
        with bind(connection, sqlite_shop.engine) as session:
            pay(box, session)
            session.commit()
        before = list(broker.batches)
        outer.commit()

    broker.wait_for(lambda one: one.topics == ["paid.1"])
    assert before == []
    assert box.close(timeout_ms=120_000)
    assert (sqlite_shop.payments(), sqlite_shop.rows()) == ([1], [])


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
def test_a_held_back_message_goes_the_way_of_the_outer_transaction(
    shop: Shop, broker: RecordingBroker, mode: Any, commits: bool
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        for number in (1, 2):
            with Session(binds={Payment: connection}, join_transaction_mode=mode) as session:
                pay(box, session, number)
                session.commit()
        outer.commit() if commits else outer.rollback()

    assert sent_and_closed(box, broker) == (["paid.1", "paid.2"] if commits else [])
    assert (shop.payments(), shop.rows()) == ([1, 2] if commits else [], [])


@pytest.mark.parametrize("raw", [True, False])
def test_a_held_back_message_goes_down_with_the_savepoint_around_its_session(
    shop: Shop, broker: RecordingBroker, raw: bool
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection, connection.begin():
        with Session(connection) as session:
            pay(box, session, 1)
            session.commit()
        savepoint = None if raw else connection.begin_nested()
        connection.execute(text("SAVEPOINT here")) if raw else None
        with Session(connection, join_transaction_mode="rollback_only") as session:
            pay(box, session, 2)
            session.commit()
        connection.execute(text("ROLLBACK TO SAVEPOINT here")) if savepoint is None else savepoint.rollback()

    assert sent_and_closed(box, broker) == ["paid.1"]
    assert (shop.payments(), shop.rows()) == ([1], [])


@pytest.mark.parametrize("end", ["ROLLBACK TO", "rollback", "close"])
def test_a_message_that_a_younger_savepoint_took_with_it_fails_the_commit_of_its_row(
    shop: Shop, broker: RecordingBroker, end: str
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode="rollback_only") as session:
            pay(box, session, 1)
            if end == "ROLLBACK TO":
                connection.execute(text("SAVEPOINT here"))
                session.commit()
                connection.execute(text("ROLLBACK TO SAVEPOINT here"))
            else:
                savepoint = connection.begin_nested()
                session.commit()
                getattr(savepoint, end)()
        with pytest.raises(NoTransaction, match="written them in a savepoint of its Connection that was rolled back"):
            connection.commit()
        connection.rollback()
        with Session(connection) as session:
            pay(box, session, 2)
            session.commit()

    assert sent_and_closed(box, broker) == ["paid.2"]
    assert (shop.payments(), shop.rows()) == ([2], [])


def test_a_message_that_a_younger_savepoint_took_with_it_is_forgotten_with_the_savepoint_around_both(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.begin() as connection:
        around = connection.begin_nested()
        with Session(connection, join_transaction_mode="rollback_only") as session:
            pay(box, session, 1)
            younger = connection.begin_nested()
            session.commit()
            younger.rollback()
        around.rollback()
        connection.execute(insert(Payment).values(id=2, note=""))

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([2], [])


def test_two_phases_of_an_outer_transaction_send_what_they_held_back(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker)

    with mysql_shop.engine.connect() as connection:
        outer = connection.begin_twophase()
        with Session(connection) as session:
            pay(box, session)
            session.commit()
        outer.prepare()
        before = list(broker.batches)
        outer.commit()

    assert before == []
    assert sent_and_closed(box, broker) == ["paid.1"]


# -- statements that end the transaction -------------------------------------------------------------------------------

ENDING = ["ROLLBACK", "COMMIT", "/* by hand */ commit"]
IMPLICIT = ["CREATE TABLE other (id INT)", "LOCK TABLES payment WRITE", "TRUNCATE payment", "SET autocommit = 1"]


def refused_while_there_are_messages(shop: Shop, broker: RecordingBroker, statement: str) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session:
        pay(box, session)
        with pytest.raises(NoTransaction, match=r"would end this transaction.*session\.commit\(\)"):
            session.execute(text(statement))
        session.rollback()
        pay(box, session, 2)
        session.commit()

    assert sent_and_closed(box, broker) == ["paid.2"]
    assert shop.payments() == [2]


@pytest.mark.parametrize("statement", ENDING)
def test_a_statement_that_ends_the_transaction_is_refused_while_there_are_messages_in_it(
    shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    refused_while_there_are_messages(shop, broker, statement)


@pytest.mark.parametrize("statement", IMPLICIT)
def test_a_statement_that_commits_implicitly_is_refused_while_there_are_messages_in_the_transaction(
    mysql_shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    refused_while_there_are_messages(mysql_shop, broker, statement)


def ended_before(shop: Shop, broker: RecordingBroker, statement: str) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        session.flush()
        session.execute(text(statement))
        box.publish("paid.1", "", session=session)
        with pytest.raises(NoTransaction, match="ended this transaction before"):
            session.commit()
        session.invalidate()  # as a pool does with a connection in a state of its own: locked tables, autocommit

    assert sent_and_closed(box, broker) == []
    assert shop.rows() == []


@pytest.mark.parametrize("statement", ENDING)
def test_a_transaction_that_a_statement_ended_before_publishes_nothing(
    shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    ended_before(shop, broker, statement)


@pytest.mark.parametrize("statement", IMPLICIT)
def test_a_transaction_that_was_committed_implicitly_before_publishes_nothing(
    mysql_shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    ended_before(mysql_shop, broker, statement)


def test_a_statement_that_ends_the_outer_transaction_is_refused_while_it_holds_a_message_back(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection, connection.begin():
        with Session(connection) as session:
            pay(box, session)
            session.commit()
        with pytest.raises(NoTransaction, match="ROLLBACK would end"):
            connection.execute(text("ROLLBACK"))

    assert sent_and_closed(box, broker) == ["paid.1"]
    assert shop.payments() == [1]


def test_tables_that_are_made_before_anything_is_written_hold_up_no_message(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.execute(text("CREATE TABLE early (id INT)"))
        pay(box, session)
        session.execute(text("CREATE TEMPORARY TABLE late (id INT)"))
        session.commit()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["paid.1"]


def test_a_raw_rollback_to_a_savepoint_takes_the_messages_behind_it_and_no_others(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session, 1)
        session.execute(text("SAVEPOINT a"))
        for number in (2, 3):  # the savepoint stays after the first rollback
            box.publish(f"paid.{number}", "", session=session)
            session.execute(insert(Payment).values(id=number, note=""))
            session.execute(text("ROLLBACK TO SAVEPOINT a"))
        pay(box, session, 4)
        session.execute(text("RELEASE SAVEPOINT a"))
        session.commit()

    assert shop.payments() == [1, 4]
    assert shop.row_topics() == ["paid.1", "paid.4"]


def test_a_rollback_to_a_savepoint_that_is_not_there_takes_no_message(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session)
        with contextlib.suppress(DBAPIError):
            session.execute(text("ROLLBACK TO SAVEPOINT nowhere"))
        session.commit()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["paid.1"]


def test_a_rollback_to_a_savepoint_that_is_not_there_leaves_those_that_are(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        pay(box, session, 1)
        session.execute(text("SAVEPOINT a"))
        pay(box, session, 2)
        with pytest.raises(DBAPIError):
            session.execute(text("ROLLBACK TO SAVEPOINT nowhere"))
        session.execute(text("ROLLBACK TO SAVEPOINT a"))
        session.commit()

    assert shop.payments() == [1]
    assert shop.row_topics() == ["paid.1"]


# -- the Connection's own commit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", ["before", "after"])
def test_a_connection_of_the_outbox_refuses_to_commit_inside_its_block(
    shop: Shop, broker: RecordingBroker, published: str
) -> None:
    box = shop.box(broker)

    def commit_by_hand() -> None:
        with box.begin() as connection:
            connection.execute(insert(Payment).values(id=1, note=""))
            box.publish("paid.1", "") if published == "before" else None
            connection.commit()
            box.publish("paid.1", "")

    with pytest.raises(NoTransaction, match="leave the block"):
        commit_by_hand()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])


def test_a_transactional_functions_connection_refuses_to_commit(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    @box.transactional
    def book(session: Session) -> None:
        session.execute(insert(Payment).values(id=1, note=""))
        session.connection().commit()

    with pytest.raises(NoTransaction, match="leave the block or the function"):
        book()

    assert shop.payments() == []


def test_a_swallowed_refusal_commits_nothing(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with contextlib.suppress(Exception), box.begin() as connection:
        connection.execute(insert(Payment).values(id=1, note=""))
        box.publish("paid.1", "")
        with contextlib.suppress(NoTransaction):
            connection.commit()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])


def test_the_connection_of_a_session_with_messages_refuses_to_commit(shop: Shop, broker: RecordingBroker) -> None:
    box = shop.box(broker)

    with Session(shop.engine) as session:
        pay(box, session)
        with pytest.raises(NoTransaction, match=r"would leave messages behind.*session\.commit\(\)"):
            session.connection().commit()
        session.rollback()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_publishing_in_a_session_whose_connection_ended_its_transaction_is_refused(
    shop: Shop, broker: RecordingBroker, end: str
) -> None:
    box = shop.box(broker, sender=NO_SENDER)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        session.flush()
        getattr(session.connection(), end)()
        with pytest.raises(NoTransaction, match="by its Connection"):
            box.publish("paid.1", "", session=session)
        session.close()
        pay(box, session, 2)
        session.commit()

    assert shop.row_topics() == ["paid.2"]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "control_fully", "create_savepoint"])
def test_a_session_whose_connection_has_rolled_back_commits_no_message(
    shop: Shop, broker: RecordingBroker, mode: Any
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            pay(box, session)
            outer.rollback()
            with pytest.raises(NoTransaction, match="rolled back by its Connection"):
                session.commit()
        connection.commit()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])


def test_an_outer_transaction_refuses_to_commit_while_a_session_in_it_has_messages(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            pay(box, session)
            with pytest.raises(NoTransaction, match="would leave messages behind"):
                outer.commit()
        outer.rollback()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])


def test_an_outer_transaction_commits_behind_a_session_that_gave_up_its_messages(
    shop: Shop, broker: RecordingBroker
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection, connection.begin():
        connection.execute(insert(Payment).values(id=7, note=""))
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            pay(box, session)
            session.rollback()
        with contextlib.suppress(Declined), Session(connection, join_transaction_mode="create_savepoint") as session:
            pay(box, session)
            raise Declined

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([7], [])


def test_a_session_that_is_forgotten_gives_its_connection_back(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker, sender=NO_SENDER)
    engine = sqlite_shop.other_engine(pool_size=1, max_overflow=0, pool_timeout=60)

    for number in range(3):
        pay(box, Session(engine), number)
        gc.collect()

    with Session(engine) as session:
        pay(box, session, 7)
        session.commit()
    assert sqlite_shop.payments() == [7]
    assert sqlite_shop.row_topics() == ["paid.7"]


def test_a_connection_commits_as_ever_where_nothing_is_published(shop: Shop, broker: RecordingBroker) -> None:
    shop.box(broker)

    with Session(shop.engine) as session:
        session.add(Payment(id=1))
        session.flush()
        session.connection().commit()

    assert shop.payments() == [1]


# -- several transactions of one Session -------------------------------------------------------------------------------


@pytest.fixture
def two_servers(mysql_shop: Shop, sqlite: Database) -> Any:
    """The outbox's shop, and another one on a server of its own."""
    with open_shop(sqlite) as other:
        yield mysql_shop, other


def write(session: Session, engine: Engine, number: int) -> None:
    session.execute(insert(Payment).values(id=number, note=""), bind_arguments={"bind": engine})


@pytest.mark.parametrize("writes_here", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_a_session_that_wrote_on_two_servers_is_refused(
    two_servers: tuple[Shop, Shop], broker: RecordingBroker, writes_here: bool, bound: bool
) -> None:
    here, there = two_servers
    box = here.box(broker)

    with Session(here.engine if bound else None) as session:
        if writes_here:
            write(session, here.engine, 1)
        else:
            session.execute(text("SELECT 1"), bind_arguments={"bind": here.engine})
        write(session, there.engine, 2)
        box.publish("paid", "", session=session)
        with pytest.raises(ConfigurationError, match="another database than the outbox's"):
            session.commit()

    assert sent_and_closed(box, broker) == []
    assert (here.payments(), there.payments(), here.rows()) == ([], [], [])


def write_many(session: Session, engine: Engine, numbers: list[int]) -> None:
    """Write by one statement for all rows, as the flush of several objects of one class does."""
    rows = [{"id": number, "note": ""} for number in numbers]
    session.execute(insert(Base.metadata.tables["payment"]), rows, bind_arguments={"bind": engine})


def test_a_session_that_wrote_many_rows_at_once_on_another_server_is_refused(
    two_servers: tuple[Shop, Shop], broker: RecordingBroker
) -> None:
    here, there = two_servers
    box = here.box(broker)

    with Session(here.engine) as session:
        write_many(session, there.engine, [1, 2])
        box.publish("paid", "", session=session)
        with pytest.raises(ConfigurationError, match="another database than the outbox's"):
            session.commit()

    assert sent_and_closed(box, broker) == []
    assert (here.payments(), there.payments(), here.rows()) == ([], [], [])


def test_a_transaction_that_a_statement_ended_behind_many_rows_publishes_nothing(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker)

    with Session(mysql_shop.engine) as session:
        write_many(session, mysql_shop.engine, [1, 2])
        session.execute(text("ROLLBACK"))
        box.publish("paid", "", session=session)
        with pytest.raises(NoTransaction, match="ended this transaction before"):
            session.commit()

    assert sent_and_closed(box, broker) == []
    assert (mysql_shop.payments(), mysql_shop.rows()) == ([], [])


def test_a_session_that_only_read_on_another_server_publishes(
    two_servers: tuple[Shop, Shop], broker: RecordingBroker
) -> None:
    here, there = two_servers
    box = here.box(broker)

    with Session() as session:
        session.execute(text("SELECT 1"), bind_arguments={"bind": there.engine})
        write(session, here.engine, 1)
        box.publish("paid", "", session=session)
        session.commit()

    assert sent_and_closed(box, broker) == ["paid"]
    assert here.payments() == [1]


def test_a_session_that_wrote_in_two_transactions_of_one_server_is_refused(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    box = mysql_shop.box(broker)
    engines = [mysql_shop.engine, mysql_shop.other_engine()]

    with Session() as session:
        for number, engine in enumerate(engines):
            write(session, engine, number)
        box.publish("paid", "", session=session)
        with pytest.raises(ConfigurationError, match="written in 2 transactions"):
            session.commit()

    assert sent_and_closed(box, broker) == []
    assert (mysql_shop.payments(), mysql_shop.rows()) == ([], [])


@pytest.mark.parametrize("numbers", [[1], [1, 2]], ids=str)
def test_of_two_transactions_on_one_server_the_one_that_was_written_in_takes_the_message(
    mysql_shop: Shop, broker: RecordingBroker, numbers: list[int]
) -> None:
    box = mysql_shop.box(broker)
    other = mysql_shop.other_engine()

    wrote: list[Engine] = []
    for engine in (mysql_shop.engine, other):
        event.listen(engine, "before_cursor_execute", lambda one, _cursor, sql, *_: _note(wrote, one, sql))

    with Session() as session:
        session.execute(text("SELECT 1"), bind_arguments={"bind": mysql_shop.engine})
        write_many(session, other, numbers)
        box.publish("paid", "", session=session)
        session.commit()

    assert wrote == [other, other]
    assert sent_and_closed(box, broker) == ["paid"]
    assert mysql_shop.payments() == numbers


def _note(wrote: list[Engine], connection: Connection, statement: str) -> None:
    if statement.startswith("INSERT"):
        wrote.append(connection.engine)


def test_a_session_over_two_databases_in_two_phases_publishes(mysql_shop: Shop, broker: RecordingBroker) -> None:
    box = mysql_shop.box(broker)
    other = mysql_shop.other_engine()

    with Session(twophase=True) as session:
        write(session, mysql_shop.engine, 1)
        write(session, other, 2)
        box.publish("paid", "", session=session)
        session.commit()

    assert sent_and_closed(box, broker) == ["paid"]
    assert mysql_shop.payments() == [1, 2]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint", "control_fully"])
@pytest.mark.parametrize("by", ["commit", "flush", "begin_nested"])
def test_a_row_that_waits_for_its_flush_does_not_go_into_the_connections_next_transaction(
    shop: Shop, broker: RecordingBroker, mode: Any, by: str
) -> None:
    box = shop.box(broker)

    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            session.add(Payment(id=1))
            box.publish("paid.1", "", session=session)
            outer.rollback()
            with pytest.raises(NoTransaction, match="committed or rolled back by its Connection"):
                getattr(session, by)()
            connection.commit()

    assert sent_and_closed(box, broker) == []
    assert (shop.payments(), shop.rows()) == ([], [])
