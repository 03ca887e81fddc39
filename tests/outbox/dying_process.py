"""A business process, or a compensator, that kills itself at a named point. Run as a module; not imported.

Arguments: `POINT URL SCHEMA BROKER_URL`. First it rolls a transaction back, then it commits one with three
messages: where it dies, and so what it leaves, is the point's meaning. Points that begin with `scan` are in a pass,
those with `discard` in an operator's discard of the parked rows.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session

from outbox import Outbox, RelayPolicy, SenderLimits
from outbox.admin.message_admin import AdminAction, MessageSelection, SchemaAdmin
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox.store.schema import RowState
from tests.fixtures.dying_broker import DyingBroker, die, nothing
from tests.fixtures.table_scan import Scan
from tests.outbox.shop import Payment

LEASE_MS = 3_600_000


def on_statement(event_name: str, begins: str, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
    """Die at the first statement on the message table that begins so."""
    if statement.startswith(begins) and "message" in statement:
        die(event_name)


def main() -> None:
    """Do what the point says."""
    point, url, schema, broker_url = sys.argv[1:5]
    chosen = {point: die}
    broker = DyingBroker(
        broker_url,
        before=chosen.get("before publish", chosen.get("scan: before publish", nothing)),
        after=chosen.get("after publish", chosen.get("scan: after publish", nothing)),
    )
    if point.startswith("scan"):
        scan(point, url, schema, broker)
    elif point.startswith("discard"):
        discard(point, url, schema)
    else:
        business(point, url, schema, broker)
    broker.close()
    die()


def business(point: str, url: str, schema: str, broker: DyingBroker) -> None:
    """Roll one transaction back, commit another, let the sender work."""
    engine = create_engine(url)
    limits = SenderLimits(lease_ms=LEASE_MS, lease_margin_ms=1_000)
    box = Outbox(engine, broker=broker, schema=schema or None, sender=limits)
    with Session(engine) as session:
        session.add(Payment(id=2))
        box.publish("payments", "rolled back", session=session)
        session.rollback()
    listen(point, engine)
    with Session(engine) as session, session.begin():
        session.add(Payment(id=1))
        for number in range(3):
            box.publish("payments", f"committed {number}", session=session)
    if not box.close(timeout_ms=120_000):
        sys.exit("the sender did not finish")


def listen(point: str, engine: Engine) -> None:
    """Die after the commit or around a statement, where the point is one. Only the sender deletes, on its engine."""
    match point:
        case "after commit":  # before the outbox's own listener, and so before the sender knows of it
            event.listen(Session, "after_commit", die, insert=True)
        case "before insert":
            event.listen(engine, "before_cursor_execute", partial(on_statement, point, "INSERT"))
        case "after insert":
            event.listen(engine, "after_cursor_execute", partial(on_statement, point, "INSERT"))
        case "before delete":
            event.listen(Engine, "before_cursor_execute", partial(on_statement, point, "DELETE"))
        case "after delete":
            event.listen(Engine, "after_cursor_execute", partial(on_statement, point, "DELETE"))


def scan(point: str, url: str, schema: str, broker: DyingBroker) -> None:
    """One pass, with a long lease."""
    engine = background_engine(open_engine(url))
    if point == "scan: before settling":
        event.listen(engine, "before_cursor_execute", partial(on_statement, point, "DELETE"))
    Scan(
        engine=engine,
        store=MessageStore(dialect=engine.dialect, schema=schema or None),
        broker=broker,
        policy=RelayPolicy(),
        lease_ms=LEASE_MS,
    ).run()


def discard(point: str, url: str, schema: str) -> None:
    """Discard every parked row; die before or after they are deleted, in their transaction."""
    engine = background_engine(open_engine(url))
    admin = SchemaAdmin(engine, schema=schema or None)
    parked = admin.find(MessageSelection(state=RowState.PARKED), action=AdminAction.DISCARD, rows_max=100)
    moment = "before" if point == "discard: before delete" else "after"
    event.listen(engine, f"{moment}_cursor_execute", partial(on_statement, point, "DELETE"))
    for _ in admin.change(AdminAction.DISCARD, parked, after_batch=lambda _: None):
        pass


main()
