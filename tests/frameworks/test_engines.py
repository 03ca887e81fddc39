"""Engines as people set them up: pools of all sizes, options, a leader and its followers. The message goes along."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, event, insert, select, text
from sqlalchemy.orm import Session, sessionmaker

from tests.frameworks.reached import Reached
from tests.outbox.shop import Payment, Shop


def pay(shop: Shop, box: Any, session: Session, topic: str, number: int) -> None:
    session.execute(insert(Payment).values(id=number, note=""))
    box.publish(topic, str(number), session=session)


def test_a_business_pool_that_is_used_up_holds_up_no_send(
    shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    engine = shop.other_engine(pool_size=1, max_overflow=0, pool_timeout=0.5)
    box = shop.box(broker_url, engine=engine)

    with Session(engine) as session:
        pay(shop, box, session, topic, 1)
        session.commit()
        session.execute(select(Payment.id)).all()  # takes the only connection again, and keeps it
        in_the_meantime = reached.wait_for(topic, 1)

    assert in_the_meantime == ["1"]
    assert box.close()
    assert shop.rows() == []


@pytest.mark.parametrize("options", [{"poolclass": NullPool}, {"pool_pre_ping": True, "pool_recycle": 1}])
def test_pools_of_other_kinds(
    shop: Shop, broker_url: str, reached: Reached, topic: str, options: dict[str, Any]
) -> None:
    engine = shop.other_engine(**options)
    box = shop.box(broker_url, engine=engine)

    for number in range(3):
        with Session(engine) as session, session.begin():
            pay(shop, box, session, topic, number)

    assert box.close()
    assert reached.bodies(topic) == ["0", "1", "2"]
    assert shop.rows() == []


def test_sessions_with_execution_options_of_their_own(
    mysql_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    box = mysql_shop.box(broker_url)
    name = mysql_shop.engine.url.database
    options: list[dict[str, Any]] = [
        {"isolation_level": "SERIALIZABLE"}, {"isolation_level": "READ UNCOMMITTED"},
        {"schema_translate_map": {None: name}}, {"stream_results": True}, {"compiled_cache": None},
    ]  # fmt: skip

    for number, chosen in enumerate(options):
        engine = mysql_shop.engine.execution_options(**chosen)
        with sessionmaker(engine).begin() as session:
            pay(mysql_shop, box, session, topic, number)

    assert box.close()
    assert reached.bodies(topic) == ["0", "1", "2", "3", "4"]
    assert mysql_shop.payments() == [0, 1, 2, 3, 4]
    assert mysql_shop.rows() == []


class RoutingSession(Session):
    """SQLAlchemy's own recipe: reads go to a follower, writes to the leader."""

    leader: Engine
    follower: Engine

    def get_bind(self, mapper: Any = None, clause: Any = None, **_: Any) -> Engine:
        """Where a statement goes."""
        writes = self._flushing or (clause is not None and not clause.is_select)
        return self.leader if writes else self.follower


@pytest.mark.parametrize("reads_first", [True, False])
def test_of_a_leader_and_a_follower_the_leaders_transaction_takes_the_message(
    mysql_shop: Shop, broker_url: str, reached: Reached, topic: str, reads_first: bool
) -> None:
    box = mysql_shop.box(broker_url)
    follower = mysql_shop.other_engine()  # behind one address, as with a proxy that routes by user
    wrote: dict[str, set[Engine]] = {"payment": set(), "message": set()}

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT"):
            wrote["payment" if "INTO payment" in statement else "message"].add(connection.engine)

    for engine in (mysql_shop.engine, follower):
        event.listen(engine, "before_cursor_execute", note)
    with sessionmaker(class_=RoutingSession)() as session:
        session.leader, session.follower = mysql_shop.engine, follower
        reading = lambda: session.execute(select(Payment.id)).all()  # noqa: E731
        reading() if reads_first else None
        session.add(Payment(id=1))
        session.flush()
        reading()
        box.publish(topic, "1", session=session)
        session.commit()

    assert wrote == {"payment": {mysql_shop.engine}, "message": {mysql_shop.engine}}
    assert box.close()
    assert reached.bodies(topic) == ["1"]
    for engine in (mysql_shop.engine, follower):
        event.remove(engine, "before_cursor_execute", note)


def test_a_connection_that_the_pool_had_lost_is_replaced_and_the_message_goes_along(
    mysql_shop: Shop, broker_url: str, reached: Reached, topic: str
) -> None:
    engine = mysql_shop.other_engine(pool_size=1, pool_pre_ping=True)
    box = mysql_shop.box(broker_url, engine=engine)
    numbers = itertools.count(1)

    for _ in range(2):
        with Session(engine) as session, session.begin():
            pay(mysql_shop, box, session, topic, next(numbers))
            mine = session.scalar(text("SELECT CONNECTION_ID()"))
        mysql_shop.execute(f"KILL {mine}")

    assert box.close()
    assert reached.bodies(topic) == ["1", "2"]
    assert mysql_shop.payments() == [1, 2]
