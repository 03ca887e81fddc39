"""A small shop to publish from: a business table, the outbox tables, an Outbox, what the tables hold. Not a fixture."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, String, create_engine, func, literal_column, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import CreateSchema

from outbox import Outbox, RelayPolicy, SenderLimits
from outbox.store.database import background_engine, open_engine
from outbox.store.message_table import MessageStore
from outbox.store.row import publish_row
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import connect_once
from outbox_core import Broker, Clock, Message
from tests.fixtures.databases import Database
from tests.fixtures.table_scan import Scan

if TYPE_CHECKING:
    from tests.fixtures.command_line import Done

BUSY_LIMITS = SenderLimits(lease_ms=60_000, lease_margin_ms=1_000, close_timeout_ms=120_000)
CONNECTIONS_END_SECONDS_MAX = 60
CLOSE_AT_END_MS = 5_000
"""For so long the end of a test waits for what nobody asserts."""
NO_SENDER = SenderLimits(queue_rows_max=0)
"""A queue without room: every commit leaves its rows to the compensator."""


class Base(DeclarativeBase):
    """The shop's tables."""


class Payment(Base):
    """A row of business."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[str] = mapped_column(String(64), default="")


class Shop:
    """The database of one test, with the tables made and everything to be closed known."""

    def __init__(self, database: Database, engine: Engine) -> None:
        self.database = database
        self.engine = engine
        connect_once(engine)
        self.tables = outbox_tables(database.namespace)
        self.store = MessageStore(dialect=engine.dialect, schema=database.schema)
        self.closing = contextlib.ExitStack()
        """What is to be closed with the shop; tests add to it."""

    def box(self, broker: Broker | str, **options: Any) -> Outbox:
        """An Outbox on this database, closed at the end of the test."""
        options = {"schema": self.database.schema, "sender": BUSY_LIMITS, **options}
        box = Outbox(options.pop("engine", self.engine), broker=broker, **options)
        self.closing.callback(box.close, timeout_ms=CLOSE_AT_END_MS)
        return box

    def other_engine(self, **options: Any) -> Engine:
        """One more engine on the same database."""
        engine = create_engine(self.database.url, **options)
        self.closing.callback(engine.dispose)
        return engine

    def background_engine(self) -> Engine:
        """An engine as background work has it: READ COMMITTED, a pool of its own."""
        background = background_engine(self.engine)
        self.closing.callback(background.dispose)
        return background

    def scan(
        self,
        broker: Broker,
        *,
        lease_ms: int = 60_000,
        batch_rows: int = 200,
        engine: Engine | None = None,
        clock: Clock | None = None,
    ) -> Scan:
        """A compensator's pass over this database; `engine`: a background engine that the test knows."""
        return Scan(
            engine=engine or self.background_engine(),
            store=self.store,
            broker=broker,
            policy=RelayPolicy(outage_delay_ms=60_000),
            batch_rows=batch_rows,
            lease_ms=lease_ms,
            clock=clock,
        )

    def command(self, *arguments: str, columns: int = 200) -> Done:
        """Run `outbox` with these arguments on this database."""
        from tests.fixtures.command_line import outbox  # not in the programs that tests start: it takes them a second

        schema = ["--schema", self.database.schema] if self.database.schema else []
        return outbox(*arguments, "--url", self.database.url, *schema, columns=columns)

    def add_due(
        self,
        count: int,
        *,
        prefix: str = "m",
        topic: str = "topic",
        table: str | None = None,
        due_for_us: int = 1_000_000,
    ) -> list[str]:
        """Add rows of a dead sender, their leases over for a second; returns their ids."""
        rows = [publish_row(Message(id=f"{prefix}-{number:04d}", topic=topic, body=b"x")) for number in range(count)]
        store = MessageStore(dialect=self.engine.dialect, schema=self.database.schema, table=table)
        with self.engine.begin() as connection:
            store.insert(connection, rows, token="d" * 32, lease_us=-due_for_us)
        return [row.id for row in rows]

    def end_leases(self, *, at_us: int = 1) -> None:
        """Let every lease be over, as if its time had passed by the database's clock: long ago, or at a moment."""
        with self.engine.begin() as connection:
            connection.execute(update(self.tables.message).values(due_at_us=at_us))

    def end_delays(self) -> None:
        """Let every row that was put off be due, as if its time had just come; rows in somebody's hands stay there."""
        # A moment ago: SQLite tells the time in whole milliseconds, and this clock is finer.
        message, now = self.tables.message, time.time_ns() // 1_000 - 2_000
        with self.engine.begin() as connection:
            connection.execute(update(message).where(message.c.token.is_(None)).values(due_at_us=now))

    def payments(self) -> list[int]:
        """The committed business rows."""
        with Session(self.engine) as session:
            return list(session.scalars(select(Payment.id).order_by(Payment.id)))

    def rows(self) -> list[dict[str, Any]]:
        """The committed rows of the message table, oldest first."""
        message = self.tables.message
        with self.engine.connect() as connection:
            # SQLite's clock has milliseconds, in which several transactions commit.
            tied = literal_column("rowid") if self.engine.dialect.name == "sqlite" else message.c.id
            found = connection.execute(select(message).order_by(message.c.created_at_us, tied))
            return [dict(row) for row in found.mappings()]

    def row_topics(self) -> list[str]:
        """The topics of the committed rows, oldest first."""
        return [row["topic"] for row in self.rows()]

    def archived(self) -> int:
        """How many rows the archive has."""
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(self.tables.archive)) or 0

    def execute(self, statement: str) -> None:
        """Run one statement and commit it."""
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    @contextlib.contextmanager
    def last_connections_ended(self) -> Iterator[None]:
        """For a block in which another process is killed: it ends once the server has ended that one's connections.

        A COMMIT that the dead process has sent may still be under way, and its locks are held until then.
        """
        before = self._connection_ids()
        yield
        deadline = time.monotonic() + CONNECTIONS_END_SECONDS_MAX
        while left := self._connection_ids() - before:
            assert time.monotonic() < deadline, f"the server has not ended the connections {left}"
            time.sleep(0.01)

    def _connection_ids(self) -> set[int]:
        """The connections to this database; SQLite's end with their process."""
        if self.database.name == "sqlite":
            return set()
        listed = text("SELECT id FROM information_schema.processlist WHERE db = :name AND id <> CONNECTION_ID()")
        with self.engine.connect() as connection:
            return set(connection.scalars(listed, {"name": self.database.business}))

    def close(self) -> None:
        """Close what was handed out, the newest first."""
        self.closing.close()


@contextlib.contextmanager
def open_shop(database: Database, *, has_tables: bool = False) -> Iterator[Shop]:
    """A shop on this database, its tables made where they are not there yet."""
    if not has_tables:
        make_tables(database)
    engine = open_engine(database.url)
    try:
        shop = Shop(database, engine)
        try:
            yield shop
        finally:
            shop.close()
    finally:
        engine.dispose()


def make_tables(database: Database) -> None:
    """Make the business table and the outbox's, by today's definitions.

    tests/migrations proves that the revisions make the same.
    """
    engine = open_engine(database.url)
    try:
        tables = outbox_tables(database.namespace)
        with engine.begin() as connection:
            if tables.metadata.schema is not None:
                connection.execute(CreateSchema(tables.metadata.schema, if_not_exists=True))
            tables.metadata.create_all(connection)
            if connection.scalar(select(tables.identity.c.id)) is None:
                own = {"number": 1, "id": secrets.token_hex(16), "owner": database.business, "is_shared": False}
                connection.execute(tables.identity.insert().values(own))
            Base.metadata.create_all(connection)
    finally:
        engine.dispose()
