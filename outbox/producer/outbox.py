"""Outbox: the producer's public face. What it does is in the modules it names; SQL, threads and events are not here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime, timedelta
from random import Random
from typing import Any, Concatenate, Final, Self, TypeVar, overload
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox.cloudevents import CloudEvents
from outbox.delivery.relay import Relay, RelayPolicy
from outbox.producer import engine_hooks, session_hooks
from outbox.producer.message_composer import Composer, delay_ms
from outbox.producer.sender import Sender, SenderLimits
from outbox.producer.transactional import P, Propagation, R, Transactional, transactional
from outbox.producer.unit_of_work import UnitOfWork
from outbox.producer.unit_writer import UnitWriter
from outbox.store.async_background import AsyncBackground
from outbox.store.database import (
    background_engine,
    open_engine,
)
from outbox.store.message_table import MessageStore
from outbox.store.ordering import order_key
from outbox.store.row import OutboxRow, cancel_row, publish_row
from outbox.store.table_placement import Placement, placement_for
from outbox.telemetry import Telemetry, default_telemetry
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, InvalidMessage, NoTransaction
from outbox_core.messages.broker_port import Broker
from outbox_core.messages.connect import connect
from outbox_core.messages.message import Message, check_message_id, check_topic

AnySession = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | Connection
S = TypeVar("S", Session, AsyncSession)
BODY_BYTES_DEFAULT: Final = 4 * 1024 * 1024


class Outbox:
    """Publishes messages in the transaction that changes the business tables, and sends them once it has committed.

    `database` is any SQLAlchemy engine or URL (MySQL, MariaDB, SQLite), `broker` a URL or a Broker object. One Outbox
    a process and database is meant; it is safe in any thread and across fork. Making one does no I/O.

        box = Outbox("mysql+pymysql://app@db/shop", broker="http://127.0.0.1:7788")

        @box.transactional
        def pay(session, order_id):
            session.add(Payment(order_id=order_id))
            box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))
    """

    def __init__(
        self,
        database: Engine | AsyncEngine | URL | str,
        *,
        broker: Broker | str,
        schema: str | Sequence[str] | None = None,
        tables: int = 1,
        ordered: Collection[str] = (),
        session_factory: Callable[[], Session] | Callable[[], AsyncSession] | None = None,
        policy: RelayPolicy | None = None,
        sender: SenderLimits | None = None,
        body_bytes_max: int = BODY_BYTES_DEFAULT,
        clock: Clock | None = None,
        random: Random | None = None,
        telemetry: Telemetry | None = None,
        cloudevents: CloudEvents | None = None,
    ) -> None:
        """`schema`: where the message tables are, `outbox` by default. `tables`: over how many message tables, and as
        many schemas as are named, the messages are split by the CRC32 of their keys.

        `ordered`: topics whose messages reach the broker, key by key, in the order in which their transactions
        committed. Transactions that publish under one key of such a topic commit one after the other.
        `body_bytes_max`: keep it, doubled for escaping, below the server's max_allowed_packet.
        `telemetry`: spans and metrics; by default spans, where opentelemetry-api is installed. `cloudevents`: give each
        message the headers of a CloudEvent.
        """
        self.engine: Engine = open_engine(database)
        self._async_engine = database if isinstance(database, AsyncEngine) else None
        self.broker: Broker = connect(broker) if isinstance(broker, str) else broker
        self.placement: Placement = placement_for(self.engine.dialect, schema, tables)
        first = self.placement.tables[0]
        store = MessageStore(dialect=self.engine.dialect, schema=first.schema, table=first.name)
        senders = sender or SenderLimits()
        self._writer = UnitWriter(engine=self.engine, store=store, lease_ms=senders.lease_ms)
        self._ordered = frozenset(check_topic(topic) for topic in ordered)
        self._session_factory = session_factory or self._default_factory()
        self._current: ContextVar[Session | AsyncSession | None] = ContextVar("outbox_current_session", default=None)
        self._sessions_by_connection: WeakKeyDictionary[Connection, Session] = WeakKeyDictionary()
        second = background_engine(self.engine)
        self._background = AsyncBackground(second) if second.dialect.is_async else second
        self._telemetry = telemetry or default_telemetry()
        self._composer = Composer(
            body_bytes_max=body_bytes_max, clock=clock, telemetry=self._telemetry, cloudevents=cloudevents
        )
        relay = Relay(
            engine=self._background, store=store, broker=self.broker, policy=policy or RelayPolicy(),
            random=random or Random(), telemetry=self._telemetry,
        )  # fmt: skip
        self._sender = Sender(relay, limits=senders, telemetry=self._telemetry)
        self._listen()

    def _listen(self) -> None:
        session_hooks.listen_to_sessions()
        engine_hooks.listen_to_engines()
        engine_hooks.watch_dialect(self.engine.dialect)

    # -- in a transaction --------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        deliver_at: datetime | None = None,
        delay: timedelta | None = None,
        message_id: str | None = None,
        session: AnySession | None = None,
    ) -> Message:
        """Publish with the transaction: sent if and only if it commits. Does no I/O.

        bytes and str go as they are, anything else as JSON. `deliver_at` (with a time zone) or `delay` hold the
        message back for up to 731 days; a delay counts from the commit, by the database's clock, and the message that
        is returned has this host's guess of its end. A `message_id` of your own makes a second publish fail
        (DuplicateMessageId at commit) while the first is in the table; afterwards the broker drops the repeat. Without
        one, an id is made. A `session` that has not begun begins, as with its own methods. Raises InvalidMessage or
        NoTransaction; then nothing was published.
        """
        message = self._composer.compose(
            topic, body, key=key, headers=headers, message_id=message_id, deliver_at=deliver_at, delay=delay
        )
        row = self._publish_row(message, delay=delay)
        self._writer.refuse_early(row)
        self._add(row, session)
        return message

    def cancel(self, message_id: str, *, session: AnySession | None = None) -> None:
        """Cancel a scheduled message if and only if the transaction commits. Does no I/O.

        The broker's answer (canceled, too_late, unknown) is kept in the archive under the cancel's own id.
        """
        row = cancel_row(check_message_id(message_id), table=self.placement.place(message_id))
        self._add(row, session)

    @overload
    def transactional(self, function: Callable[Concatenate[S, P], R], /) -> Transactional[P, R]: ...
    @overload
    def transactional(
        self, /, *, propagation: Propagation | str = ...
    ) -> Callable[[Callable[Concatenate[S, P], R]], Transactional[P, R]]: ...
    def transactional(
        self,
        function: Callable[Concatenate[S, P], R] | None = None,
        /,
        *,
        propagation: Propagation | str = Propagation.REQUIRED,
    ) -> Any:
        """Decorate a business function: it runs in a transaction and gets its session as the first argument.

        An exception rolls back and is raised on. See Propagation for what happens when a transaction is open already.
        """
        try:
            chosen = Propagation(propagation)
        except ValueError as error:
            raise ConfigurationError(f"propagation is required, requires_new or nested, not {propagation!r}") from error
        if function is not None:
            return transactional(self, function, chosen)
        return lambda decorated: transactional(self, decorated, chosen)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A plain Connection in a transaction: publish(..., session=connection), or without session, inside the
        block.
        """
        with self.new_session() as session, self.as_current(session), session.begin():
            connection = session.connection(bind_arguments=self.bind_arguments(session))
            self._sessions_by_connection[connection] = session
            try:
                yield connection
            finally:
                self._sessions_by_connection.pop(connection, None)

    def close(self, *, timeout_ms: int | None = None) -> bool:
        """Send what is queued, within the deadline, and let go of connections; True when all was sent.

        What was not sent is in the table, and the compensator sends it. Idempotent.
        """
        emptied = self._sender.close(timeout_ms=timeout_ms)
        self._background.dispose()
        return emptied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the modules beside this one ask of an Outbox -----------------------------------------------------------

    def new_session(self) -> Session:
        """A fresh session of the business's factory."""
        session = self._session_factory()
        if isinstance(session, AsyncSession):
            raise ConfigurationError("this Outbox is on an async engine: decorate `async def` functions")
        return self._owned(session)

    def new_async_session(self) -> AsyncSession:
        """A fresh AsyncSession of the business's factory."""
        session = self._session_factory()
        if not isinstance(session, AsyncSession):
            raise ConfigurationError("an `async def` function needs an Outbox on an async engine (create_async_engine)")
        self._owned(session.sync_session)
        return session

    def current_session(self) -> Session | AsyncSession | None:
        """The session of the transactional function that is running in this context, while its transaction is open."""
        session = self._current.get()
        # A task or generator may have inherited the context of a function that is over by now.
        return session if session is not None and session.in_transaction() else None

    @contextmanager
    def as_current(self, session: Session | AsyncSession) -> Iterator[None]:
        """Make this the session that publish() and nested functions find."""
        token = self._current.set(session)
        try:
            yield
        finally:
            # A framework may resume a generator in another context than it began in: what was set there is out of
            # reach, and the transaction may have committed, so this is nobody's error.
            with suppress(ValueError):
                self._current.reset(token)

    def bind_arguments(self, session: Session) -> dict[str, Engine | Connection]:
        """Which of a session's databases the outbox is in; only a session without a bind of its own needs telling."""
        return {"bind": self.engine} if session.bind is None else {}

    def shares_database(self, connection: Connection) -> bool:
        """Whether a transaction of this connection can hold the outbox's rows."""
        return self._writer.shares_database(connection)

    def is_own(self, connection: Connection) -> bool:
        """Whether this connection is one of the outbox's own engine, whatever its options."""
        return connection.engine.pool is self.engine.pool

    def write(self, connection: Connection, unit: UnitOfWork) -> None:
        """Write a unit's rows, just before its commit. What is raised here makes the commit fail, and roll back."""
        self._writer.write(connection, unit, token=self._sender.token)

    def committed(self, unit: UnitOfWork) -> None:
        """Hand a committed unit to the sender. Never raises: the commit has succeeded, whatever becomes of the send."""
        self._telemetry.committed(unit.written_rows)
        self._sender.offer(unit.written_rows, written_at_ms=unit.written_at_ms)

    def _default_factory(self) -> Callable[[], Session] | Callable[[], AsyncSession]:
        if self._async_engine is not None:
            return async_sessionmaker(self._async_engine)
        return sessionmaker(self.engine)

    def _owned(self, session: Session) -> Session:
        session_hooks.own(session)
        self._write_first(session)
        return session

    def _write_first(self, session: Session) -> None:
        if self.engine.dialect.name == "sqlite":
            session_hooks.write_first(session)

    # -- helpers of publish and cancel -------------------------------------------------------------------------------

    def _publish_row(self, message: Message, *, delay: timedelta | None) -> OutboxRow:
        table = self.placement.place(message.id if message.key is None else message.key)
        held_ms = None if delay is None else delay_ms(delay)
        if message.topic not in self._ordered:
            return publish_row(message, table=table, delay_ms=held_ms)
        if message.key is None:
            raise InvalidMessage(f"the topic {message.topic} is ordered, key by key: publish with key=")
        return publish_row(message, table=table, order_key=order_key(message.topic, message.key), delay_ms=held_ms)

    def _add(self, row: OutboxRow, given: AnySession | None) -> None:
        session = self._session(given)
        self._write_first(session)
        session_hooks.unit_of(session, self).add(row, session_hooks.open_savepoints(session))

    def _session(self, given: AnySession | None) -> Session:
        session = self._session_of(self._current.get() if given is None else given)
        if given is not None and session is not None and session.autobegin and not session.in_transaction():
            session.begin()
        if session is None or not session.in_transaction():
            raise NoTransaction(
                "publish and cancel belong to a transaction: call them in a function decorated with "
                "@box.transactional, or pass session= with an open transaction (with session.begin(): ...)"
            )
        return session

    def _session_of(self, given: AnySession | None) -> Session | None:
        session: Session | None
        match given:
            case None:
                session = None
            case AsyncSession():
                session = given.sync_session
            case async_scoped_session():
                session = given().sync_session
            case scoped_session():
                session = given()
            case Connection():
                session = self._sessions_by_connection.get(given)
                if session is None:
                    raise NoTransaction(
                        "this Connection is not the outbox's: open it with `with box.begin() as connection`"
                    )
            case Session():
                session = given
            case _:
                raise NoTransaction(f"session must be a SQLAlchemy session, not {type(given).__name__}")
        return session
