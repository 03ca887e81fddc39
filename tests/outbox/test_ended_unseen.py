"""Transactions that end where no statement's text says so: in a procedure, past SQLAlchemy, by an error of SQLite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, create_engine, insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import NoTransaction, Outbox, TransactionDoomed
from tests.fixtures.servers import ReadyDatabase
from tests.outbox.deadlock import add_rows_to_fight_over, become_a_deadlocks_victim
from tests.outbox.procedures import make_procedures
from tests.outbox.recording_broker import RecordingBroker
from tests.outbox.shop import Payment, Shop, make_tables, open_shop

ENDING = [
    "CALL abandon()",
    "CALL abandon_loudly()",
    "CALL settle()",
    "CALL settle_and_begin()",
    "CALL list_and_abandon()",
]
ENDING_ON_MARIADB = [
    "EXECUTE IMMEDIATE 'ROLLBACK'",
    "BEGIN NOT ATOMIC ROLLBACK; END",
    "IF 1 = 1 THEN COMMIT; END IF",
    "SET STATEMENT max_statement_time = 60 FOR CALL abandon()",
]

Act = Callable[[Session], object]


@pytest.fixture
def mariadb_shop(ready_database: ReadyDatabase) -> Iterator[Shop]:
    """The shop on MariaDB alone, with the procedures above."""
    with ready_database("mariadb", make_tables) as database, open_shop(database, has_tables=True) as shop:
        make_procedures(shop)
        yield shop


@pytest.fixture
def procedures(mysql_shop: Shop) -> Shop:
    """A shop with the procedures above."""
    make_procedures(mysql_shop)
    return mysql_shop


def write(session: Session, number: int = 1) -> None:
    session.add(Payment(id=number))
    session.flush()


def sent_and_closed(box: Outbox, broker: RecordingBroker) -> list[str]:
    """What was sent in the end."""
    assert box.close(timeout_ms=120_000)
    return broker.topics


def run(session: Session, statement: str) -> None:
    """Run a statement whose error nobody looks at."""
    with contextlib.suppress(DBAPIError):
        session.execute(text(statement))


def run_all(session: Session, *acts: Act) -> None:
    for act in acts:
        act(session)


def is_refused(shop: Shop, broker: RecordingBroker, *acts: Act, match: str) -> None:
    """A payment, these acts, and a commit that is refused: of what it would have committed nothing stays."""
    box = shop.box(broker)

    with Session(shop.engine) as session:
        write(session)
        with pytest.raises(NoTransaction, match=match):
            run_all(session, *acts, Session.commit)

        session.rollback()
        write(session, 90)
        box.publish("next", "", session=session)
        session.commit()
    assert sent_and_closed(box, broker) == ["next"]
    assert 2 not in shop.payments()
    assert 90 in shop.payments()
    assert shop.rows() == []


@pytest.mark.parametrize("statement", ENDING)
@pytest.mark.parametrize("order", ["before the message", "after it", "after it, and more is written"])
def test_a_procedure_that_ends_the_transaction_lets_it_not_be_committed(
    procedures: Shop, broker: RecordingBroker, statement: str, order: str
) -> None:
    box = procedures.box(broker)

    def publish(session: Session) -> None:
        box.publish("paid", "", session=session)

    def call(session: Session) -> None:
        run(session, statement)

    def write_more(session: Session) -> None:
        write(session, 2)

    acts: list[Act] = [call, publish] if order == "before the message" else [publish, call]
    acts += [write_more] if "more" in order else []
    is_refused(procedures, broker, *acts, match=r"CALL \w+ ended this transaction before")


@pytest.mark.parametrize("statement", ENDING_ON_MARIADB)
def test_a_compound_statement_that_ends_the_transaction_lets_it_not_be_committed(
    mariadb_shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    box = mariadb_shop.box(broker)

    def publish_and_run(session: Session) -> None:
        box.publish("paid", "", session=session)
        run(session, statement)

    is_refused(mariadb_shop, broker, publish_and_run, match="ended this transaction before")


def in_savepoint(session: Session) -> None:
    with contextlib.suppress(DBAPIError), session.begin_nested():
        session.execute(text("CALL abandon()"))


def prepared(session: Session) -> None:
    session.execute(text("PREPARE ending FROM 'ROLLBACK'"))
    session.execute(text("EXECUTE ending"))


def to_older_savepoint(session: Session) -> None:
    session.execute(text("SAVEPOINT older"))
    session.execute(text("CALL abandon_part()"))


def streamed(session: Session) -> None:
    statement = text("CALL list_one_and_abandon()").execution_options(stream_results=True)
    with session.execute(statement) as result:
        assert list(result) == [(1,)]


DOORS: dict[str, Act] = {
    "driver's SQL": lambda session: session.connection().exec_driver_sql("CALL abandon()"),
    "many": lambda session: session.execute(text("CALL abandon() /* :n */"), [{"n": 1}, {"n": 2}]),
    "in a savepoint": in_savepoint,
    "prepared": prepared,
    "to an older savepoint": to_older_savepoint,
    "streamed": streamed,
    "connection": lambda session: session.connection().execute(text("CALL abandon()")),
}


@pytest.mark.parametrize("door", DOORS)
def test_by_whichever_door_a_procedure_is_called(procedures: Shop, broker: RecordingBroker, door: str) -> None:
    box = procedures.box(broker)

    def publish(session: Session) -> None:
        box.publish("paid", "", session=session)

    is_refused(procedures, broker, publish, DOORS[door], match="ended this transaction before")


@pytest.mark.parametrize("name", ["good", "good_inside", "good_serializable"])
def test_a_procedure_that_ends_nothing_is_committed_with_its_message(
    procedures: Shop, broker: RecordingBroker, name: str
) -> None:
    box = procedures.box(broker)

    with Session(procedures.engine) as session:
        with session.execute(text(f"CALL {name}()")) as result:
            rows = list(result) if result.returns_rows else None
        box.publish("paid", "", session=session)
        session.commit()

    assert rows == ([(1,)] if name == "good" else None)
    assert sent_and_closed(box, broker) == ["paid"]
    assert procedures.payments() == ([] if name == "good_inside" else [50])


def test_all_result_sets_of_a_procedure_can_be_read_before_the_commit(
    procedures: Shop, broker: RecordingBroker
) -> None:
    box = procedures.box(broker)

    with Session(procedures.engine) as session:
        result = session.execute(text("CALL good()"))
        box.publish("paid", "", session=session)
        cursor = result.cursor
        assert cursor is not None
        sets = [cursor.fetchall(), cursor.nextset() and cursor.fetchall()]
        session.commit()

    assert sets == [((1,),), ((2,),)]
    assert sent_and_closed(box, broker) == ["paid"]


def savepoints_sent(connection: Connection) -> int:
    rows = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Com_savepoint'")
    return int(rows.one()[1])


@pytest.mark.parametrize("statement", ["CALL abandon()", "CALL settle()"])
def test_who_publishes_nothing_commits_as_if_nobody_looked(
    procedures: Shop, broker: RecordingBroker, statement: str
) -> None:
    procedures.box(broker)

    with Session(procedures.engine) as session:
        write(session)
        session.execute(text(statement))
        write(session, 2)
        session.commit()
        write(session, 3)
        session.execute(text(statement.replace("settle", "abandon")))
        session.commit()

    assert procedures.payments() == ([2] if "abandon" in statement else [1, 2, 50])


def test_nothing_is_asked_of_a_connection_without_a_session_or_without_a_procedure(
    procedures: Shop, broker: RecordingBroker
) -> None:
    box = procedures.box(broker)
    with Session(procedures.engine) as session:
        write(session)
        box.publish("paid", "", session=session)
        session.commit()
        without_procedure = savepoints_sent(session.connection())

    with procedures.engine.connect() as connection, connection.begin():
        connection.execute(text("CALL good_inside()"))
        before = savepoints_sent(connection)
        connection.execute(text("CALL abandon()"))
        without_session = savepoints_sent(connection) - before

    assert (without_procedure, without_session) == (0, 0)
    assert sent_and_closed(box, broker) == ["paid"]


def test_what_a_procedure_undoes_in_the_outer_transaction_is_not_sent(
    procedures: Shop, broker: RecordingBroker
) -> None:
    box = procedures.box(broker)

    with procedures.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            write(session)
            box.publish("paid", "", session=session)
            session.commit()
        connection.execute(text("CALL abandon()"))
        with pytest.raises(NoTransaction, match="CALL abandon ended this transaction before"):
            outer.commit()

    assert sent_and_closed(box, broker) == []
    assert (procedures.payments(), procedures.rows()) == ([], [])


def test_what_a_swallowed_deadlock_undid_in_the_outer_transaction_is_not_sent(
    mysql_shop: Shop, broker: RecordingBroker
) -> None:
    add_rows_to_fight_over(mysql_shop)
    box = mysql_shop.box(broker)

    with mysql_shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            write(session, 50)
            box.publish("paid", "", session=session)
            session.commit()
            become_a_deadlocks_victim(session, mysql_shop.engine)
        with pytest.raises(NoTransaction, match="an error that was swallowed ended this transaction before"):
            outer.commit()

    assert sent_and_closed(box, broker) == []
    assert (50 in mysql_shop.payments(), mysql_shop.rows()) == (False, [])


def test_two_phases_go_on_after_a_procedure(procedures: Shop, broker: RecordingBroker) -> None:
    box = procedures.box(broker)

    with Session(procedures.engine, twophase=True) as session:
        session.execute(text("CALL good_inside()"))
        write(session)
        box.publish("paid", "", session=session)
        with pytest.raises(DBAPIError, match="1399"):
            session.execute(text("CALL settle()"))
        session.rollback()
        write(session, 3)
        box.publish("next", "", session=session)
        session.execute(text("CALL good_inside()"))
        session.commit()

    assert sent_and_closed(box, broker) == ["next"]
    assert procedures.payments() == [3]


# -- past SQLAlchemy ---------------------------------------------------------------------------------------------------


def past_sqlalchemy(statement: str) -> Act:
    def act(session: Session) -> None:
        cursor = session.connection().connection.cursor()
        cursor.execute(statement)
        cursor.close()

    return act


@pytest.mark.parametrize("statement", ["ROLLBACK", "COMMIT"])
@pytest.mark.parametrize("writes_more", [False, True])
@pytest.mark.parametrize("is_first", [False, True], ids=["after the message", "before the message"])
def test_what_a_raw_cursor_ends_is_not_committed(
    shop: Shop, broker: RecordingBroker, statement: str, is_first: bool, writes_more: bool
) -> None:
    box = shop.box(broker)

    def publish(session: Session) -> None:
        box.publish("paid", "", session=session)

    def write_more(session: Session) -> None:
        write(session, 2)

    end = past_sqlalchemy(statement)
    acts = [*([end, publish] if is_first else [publish, end]), *([write_more] if writes_more else [])]
    is_refused(shop, broker, *acts, match="went past SQLAlchemy ended this transaction before")


@pytest.mark.parametrize("is_first", [False, True], ids=["after the message", "before the message"])
def test_a_procedure_that_a_raw_cursor_calls_is_seen_by_the_servers_status(
    procedures: Shop, broker: RecordingBroker, is_first: bool
) -> None:
    box = procedures.box(broker)

    def publish(session: Session) -> None:
        box.publish("paid", "", session=session)

    def call(session: Session) -> None:
        cursor = session.connection().connection.cursor()
        cursor.callproc("abandon")
        cursor.close()

    acts: list[Act] = [call, publish] if is_first else [publish, call]
    is_refused(procedures, broker, *acts, match="ended this transaction before")


# -- SQLite ------------------------------------------------------------------------------------------------------------

MAKES_IT_FAIL = {
    "insert": "INSERT OR ROLLBACK INTO payment VALUES (1, '')",
    "replace": "UPDATE OR ROLLBACK payment SET id = 1 WHERE id = 5",
    "table": "INSERT INTO strict VALUES (1)",
    "trigger": "INSERT INTO guarded VALUES (1)",
}


@pytest.fixture
def strict_shop(sqlite_shop: Shop) -> Shop:
    """A shop with tables that roll back the whole transaction for one row that they refuse."""
    sqlite_shop.execute("CREATE TABLE strict (id INTEGER PRIMARY KEY ON CONFLICT ROLLBACK)")
    sqlite_shop.execute("INSERT INTO strict VALUES (1)")
    sqlite_shop.execute("CREATE TABLE guarded (id INTEGER)")
    sqlite_shop.execute("CREATE TRIGGER guard BEFORE INSERT ON guarded BEGIN SELECT RAISE(ROLLBACK, 'not here'); END")
    return sqlite_shop


@pytest.mark.parametrize("how", MAKES_IT_FAIL)
@pytest.mark.parametrize("is_first", [False, True], ids=["after the message", "before the message"])
def test_what_sqlite_rolled_back_for_one_row_is_not_committed(
    strict_shop: Shop, broker: RecordingBroker, how: str, is_first: bool
) -> None:
    box = strict_shop.box(broker)

    with Session(strict_shop.engine) as session:
        write(session)
        write(session, 5)
        if not is_first:
            box.publish("paid", "", session=session)
        run(session, MAKES_IT_FAIL[how])
        with pytest.raises(TransactionDoomed, match="rolled this transaction back earlier"):
            go_on(session, box if is_first else None)
        session.rollback()
        write(session, 3)
        session.commit()

    assert sent_and_closed(box, broker) == []
    assert (strict_shop.payments(), strict_shop.rows()) == ([3], [])


def go_on(session: Session, box: Outbox | None) -> None:
    """Write, and commit, as if nothing had happened; with an outbox, publish first."""
    if box is not None:
        box.publish("paid", "", session=session)
    write(session, 2)
    session.commit()


def test_an_error_of_one_statement_leaves_sqlites_transaction_open(sqlite_shop: Shop, broker: RecordingBroker) -> None:
    box = sqlite_shop.box(broker)

    with Session(sqlite_shop.engine) as session:
        write(session)
        box.publish("paid", "", session=session)
        run(session, "INSERT OR ABORT INTO payment VALUES (1, '')")
        run(session, "INSERT INTO nowhere VALUES (1)")
        session.commit()

    assert sent_and_closed(box, broker) == ["paid"]
    assert sqlite_shop.payments() == [1]


# -- SET autocommit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["SET autocommit = 1", "CALL switch()"])
def test_a_connection_that_was_switched_to_autocommit_is_replaced(
    mysql_shop: Shop, broker: RecordingBroker, statement: str
) -> None:
    mysql_shop.execute("CREATE PROCEDURE switch() SET autocommit = 1")
    engine = create_engine(mysql_shop.database.url, pool_size=1, max_overflow=0)
    mysql_shop.closing.callback(engine.dispose)
    box = mysql_shop.box(broker, engine=engine)

    with Session(engine) as session:
        session.execute(text(statement))
        write(session)
        box.publish("paid", "", session=session)
        with pytest.raises(NoTransaction, match=r"SET autocommit|CALL switch"):
            session.commit()
    with Session(engine) as session:
        session.execute(insert(Payment).values(id=2, note=""))
        box.publish("next", "", session=session)
        session.commit()

    assert sent_and_closed(box, broker) == ["next"]
    assert 2 in mysql_shop.payments()
