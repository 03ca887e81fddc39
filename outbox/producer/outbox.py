"""Outbox: the producer's public API. It delegates SQL, threads and SQLAlchemy's events to its collaborators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from random import Random
from typing import Any, Concatenate, Final, Self, TypeVar, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.cloudevents import CloudEvents
from outbox.delivery.relay import Relay, RelayPolicy
from outbox.producer import engine_hooks, session_hooks
from outbox.producer.commit_handler import CommitHandler, UnitWriter
from outbox.producer.message_composer import Composer, delay_ms
from outbox.producer.sender import Sender, SenderLimits
from outbox.producer.session_provider import AnySession, SessionFactory, SessionProvider
from outbox.producer.timing_store_feeder import TimingStoreFeeder
from outbox.producer.transactional import P, Propagation, R, TransactionalFunction, transactional
from outbox.store.async_background import AsyncBackground
from outbox.store.database import (
    background_engine,
    open_engine,
)
from outbox.store.message_table import MessageStore
from outbox.store.order_table import order_key
from outbox.store.row import OutboxRow, cancel_row, publish_row
from outbox.store.table_placement import Placement, placement_for
from outbox.telemetry import Telemetry, default_telemetry
from outbox_core.common.clock import Clock
from outbox_core.common.errors import ConfigurationError, InvalidMessage, NotSupported
from outbox_core.messages.broker_port import Broker, Capability, capabilities_of
from outbox_core.messages.connect import connect, connect_timing
from outbox_core.messages.message import Message, check_message_id, check_topic
from outbox_core.messages.timing_port import TimerSink
from outbox_core.runtime.logs import mask_secrets

S = TypeVar("S", Session, AsyncSession)
BODY_BYTES_DEFAULT: Final = 4 * 1024 * 1024


class Outbox:
    """Publishes messages in the transaction that changes the business tables, and sends them once it has committed.

    `database` is any SQLAlchemy engine or URL (MySQL, MariaDB, SQLite), `broker` a URL or a Broker object. Make one
    Outbox for each process and database; it is safe in any thread and across fork. Making one does no I/O.

        box = Outbox("mysql+pymysql://app@db/shop", broker="http://127.0.0.1:7788")

        @box.transactional
        def pay(session, order_id):
            session.add(Payment(order_id=order_id))
            box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))
    """

    broker: Broker
    """What its messages are sent to."""

    def __init__(
        self,
        database: Engine | AsyncEngine | URL | str,
        *,
        broker: Broker | str,
        schema: str | Sequence[str] | None = None,
        tables: int = 1,
        ordered: Collection[str] = (),
        session_factory: SessionFactory | None = None,
        policy: RelayPolicy | None = None,
        sender: SenderLimits | None = None,
        body_bytes_max: int = BODY_BYTES_DEFAULT,
        clock: Clock | None = None,
        random: Random | None = None,
        telemetry: Telemetry | None = None,
        cloudevents: CloudEvents | None = None,
        timing: TimerSink | str | None = None,
    ) -> None:
        """`schema`: schemas of the message tables alone, one or several; by default they are in the business's.
        `tables`: the number of message tables, over all schemas, into which messages are split by CRC32 of their keys.
        `ordered`: topics whose messages reach the broker, key by key, in the order in which their transactions
        committed. Transactions that publish under one key of such a topic commit one after the other. `body_bytes_max`:
        keep it, doubled for escaping, below the server's max_allowed_packet. `telemetry`: spans and metrics; by default
        spans, if opentelemetry-api is installed. `cloudevents`: give each message the headers of a CloudEvent.
        `timing`: a timing store, e.g. `redis://redis/?name=shop`: scheduled messages wait in the message table, and a
        compensator with the same store sends them when due.
        """
        self.engine: Engine = open_engine(database)
        self.broker, self._closes_broker = _connected(broker)
        self.placement: Placement = placement_for(self.engine.dialect, schema, tables)
        store = MessageStore(dialect=self.engine.dialect, schema=self.placement.schemas[0])
        senders, policy, random = sender or SenderLimits(), policy or RelayPolicy(), random or Random()
        self._writer = UnitWriter(
            engine=self.engine, store=store, lease_ms=senders.lease_ms, placement=self.placement,
            keep_archive=policy.keep_archive,
        )  # fmt: skip
        self._is_timed, self._ordered = timing is not None, _ordered_topics(ordered)
        self._sessions = _sessions_of(self.engine, database, session_factory)
        telemetry = telemetry or default_telemetry()
        self._composer = Composer(
            body_bytes_max=body_bytes_max, clock=clock, telemetry=telemetry, cloudevents=cloudevents
        )
        self._background = _open_background(self.engine)
        relay = Relay(
            engine=self._background, store=store, broker=self.broker, policy=policy, random=random, telemetry=telemetry
        )
        self._sender = Sender(relay, limits=senders, telemetry=telemetry, timers=self._timers(timing, store, telemetry))
        self._sender.broker_name = _shown(broker)
        self._commits = CommitHandler(engine=self.engine, writer=self._writer, sender=self._sender, telemetry=telemetry)
        _listen(self.engine)

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
        """Publish in the transaction: the message is sent if and only if it commits. Does no I/O.

        bytes and str stay unchanged, anything else becomes JSON. `deliver_at` (with a time zone) or `delay` delay the
        message by up to 731 days; a delay counts from the commit, by the database's clock, and the returned message has
        this host's estimate of its end. With an explicit `message_id` a second publish fails (DuplicateMessageId at
        commit) while the first is in the table; afterwards the broker drops the repeat. Without one, an id is
        generated. A `session` that has not begun begins, as with its own methods. Raises InvalidMessage,
        NoTransaction, or NotSupported for a delay that the broker does not support; then nothing was published.
        """
        message = self._composer.compose(
            topic, body, key=key, headers=headers, message_id=message_id, deliver_at=deliver_at, delay=delay,
            is_ordered=topic in self._ordered,
        )  # fmt: skip
        if message.deliver_at_ms is not None and not self._is_timed:
            self._require(Capability.DELAY)
        row = self._publish_row(message, delay=delay)
        self._writer.refuse_early(row)
        self._add(row, session)
        return message

    def cancel(self, message_id: str, *, session: AnySession | None = None) -> None:
        """Cancel a scheduled message if and only if the transaction commits. Does no I/O.

        The result (canceled, too_late, unknown) is kept in the archive under the cancel's own id: the broker's, or with
        `timing` that of the transaction, which withdraws the message from its table.
        """
        if not self._is_timed:
            self._require(Capability.CANCEL)
        table_number = self.placement.number(message_id)
        row = cancel_row(check_message_id(message_id), table_number=table_number, is_timed=self._is_timed)
        self._add(row, session)

    @overload
    def transactional(self, function: Callable[Concatenate[S, P], R], /) -> TransactionalFunction[P, R]: ...
    @overload
    def transactional(
        self, /, *, propagation: Propagation | str = ...
    ) -> Callable[[Callable[Concatenate[S, P], R]], TransactionalFunction[P, R]]: ...
    def transactional(
        self,
        function: Callable[Concatenate[S, P], R] | None = None,
        /,
        *,
        propagation: Propagation | str = Propagation.REQUIRED,
    ) -> Any:
        """Decorate a business function: it runs in a transaction and gets its session as the first argument.

        An exception rolls back and is re-raised. See Propagation for what happens if a transaction is open already.
        """
        try:
            chosen = Propagation(propagation)
        except ValueError as error:
            raise ConfigurationError(f"propagation is required, requires_new or nested, not {propagation!r}") from error
        if function is not None:
            return transactional(self._sessions, function, chosen)
        return lambda decorated: transactional(self._sessions, decorated, chosen)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Begin a transaction and return its plain Connection. Inside the block call publish(), with or without
        `session=connection`.
        """
        with self._sessions.connection({"bind": self.engine}) as connection:
            yield connection

    def close(self, *, timeout_ms: int | None = None) -> bool:
        """Send what is queued, within the deadline, and close connections; returns whether nothing is queued any more.
        A broker that was given as a URL is closed with it, once its last request has ended; one that was given as an
        object is its maker's to close.

        True does not say that the broker has accepted everything: a message that it refused, or that an outage kept
        back, is queued no more. Such rows stay in the table, as do unsent ones, and the compensator sends them.
        Idempotent.
        """
        timeout_ms = self._sender.limits.close_timeout_ms if timeout_ms is None else timeout_ms
        ends_s = time.monotonic() + timeout_ms / 1000
        emptied = self._sender.close(timeout_ms=timeout_ms)
        if self._closes_broker:
            with suppress(RuntimeError):  # the interpreter ends, and the connections with it
                # In a thread: what a request that is on its way stores is to be settled, and the caller waits no longer
                # than it said, whatever the server does.
                closing = threading.Thread(target=self._close_broker, name="outbox-close", daemon=True)
                closing.start()
                closing.join(max(0.0, ends_s - time.monotonic()))
        self._background.dispose()
        return emptied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_broker(self) -> None:
        self._sender.join()
        self.broker.close()

    def _timers(
        self, timing: TimerSink | str | None, store: MessageStore, telemetry: Telemetry
    ) -> TimingStoreFeeder | None:
        if timing is None:
            return None
        if len(self.placement.schemas) > 1:
            raise ConfigurationError(
                "a timing store is of one message schema, and this Outbox has several: "
                "split messages over tables of one schema, or make an Outbox for each"
            )
        sink = connect_timing(timing) if isinstance(timing, str) else timing
        return TimingStoreFeeder(sink, store=store, telemetry=telemetry)

    # -- helpers of publish and cancel -------------------------------------------------------------------------------

    def _require(self, capability: Capability) -> None:
        """Reject in the business transaction what the broker could only reject long after its commit."""
        if capability not in capabilities_of(self.broker):
            raise NotSupported(
                f"this broker cannot {capability}: run a delay service in front of it (outbox delay serve), "
                "and add ?delay=http://HOST:7799 to the broker's URL"
            )

    def _publish_row(self, message: Message, *, delay: timedelta | None) -> OutboxRow:
        table_number = self.placement.number(message.id if message.key is None else message.key)
        held_ms = None if delay is None else delay_ms(delay)
        is_timed = self._is_timed and message.deliver_at_ms is not None
        if message.topic not in self._ordered:
            return publish_row(message, table_number=table_number, delay_ms=held_ms, is_timed=is_timed)
        if is_timed:
            raise NotSupported(
                f"the topic {message.topic} is ordered: younger messages would wait until this one is due; "
                "schedule it on a topic that is not"
            )
        if message.key is None:
            raise InvalidMessage(f"the topic {message.topic} is ordered, key by key: publish with key=")
        ordered_by = order_key(message.topic, message.key)
        return publish_row(message, table_number=table_number, order_key=ordered_by, delay_ms=held_ms)

    def _add(self, row: OutboxRow, passed_session: AnySession | None) -> None:
        session = self._sessions.publishing_session(passed_session)
        session_hooks.unit_of(session, self._commits).add(row, session_hooks.open_savepoints(session))


def _connected(broker: Broker | str) -> tuple[Broker, bool]:
    """The broker, and whether it was made here and so ends with the Outbox."""
    return (connect(broker), True) if isinstance(broker, str) else (broker, False)


def _shown(broker: Broker | str) -> str:
    return mask_secrets(broker) if isinstance(broker, str) else type(broker).__name__


def _ordered_topics(ordered: Collection[str]) -> frozenset[str]:
    """Returns the names. Raises ConfigurationError for one text, which is a collection of topics of one letter."""
    if isinstance(ordered, str):
        raise ConfigurationError(f"ordered is a set of topics: write ordered={{{ordered!r}}}")
    return frozenset(check_topic(topic) for topic in ordered)


def _sessions_of(
    engine: Engine, database: Engine | AsyncEngine | URL | str, factory: SessionFactory | None
) -> SessionProvider:
    async_engine = database if isinstance(database, AsyncEngine) else None
    if engine.dialect.is_async and not isinstance(database, Engine | AsyncEngine):
        async_engine = AsyncEngine(engine)
    return SessionProvider(engine, async_engine=async_engine, factory=factory)


def _open_background(engine: Engine) -> Engine | AsyncBackground:
    second = background_engine(engine)
    return AsyncBackground(second) if second.dialect.is_async else second


def _listen(engine: Engine) -> None:
    session_hooks.listen_to_sessions()
    engine_hooks.listen_to_engines()
    engine_hooks.watch_dialect(engine.dialect)
