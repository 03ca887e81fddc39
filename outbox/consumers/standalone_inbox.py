"""Inbox: makes consumers with their own client of any broker, and their own transactions, handle each message once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy import URL, Connection, Engine, RootTransaction
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox.consumers.handler import (
    ENDED_BY_HANDLER,
    Outcome,
    await_handler,
    call_handler,
    handler_name,
    is_async,
    refuse_generator,
)
from outbox.consumers.inbox_table import InboxStore
from outbox.producer.engine_hooks import (
    ending_statement,
    forget_mark,
    is_over,
    keep_mark,
    listen_to_engines,
    refuse_autocommit,
    refuse_if_rolled_back,
)
from outbox.store.database import open_engine
from outbox.store.table_placement import connect_once
from outbox_core.common.errors import ConfigurationError, NoTransaction
from outbox_core.messages.message import check_group, check_message_id, check_topic


class Inbox:
    """Records which messages each consumer group has handled, in the database whose tables the handlers change.

        inbox = Inbox(engine)

        def on_message(channel, method, properties, body):
            with Session(engine) as session, session.begin():
                inbox.handle(session, properties.message_id, "ticketing", issue_ticket, topic=method.routing_key)
            channel.basic_ack(method.delivery_tag)

    The order makes it safe: mark and effect commit together, and the broker gets its acknowledgement after
    that. A consumer that dies in between gets the message again, and the mark drops it. Thread-safe.
    """

    def __init__(self, database: Engine | AsyncEngine | URL | str, *, schema: str | None = None) -> None:
        """`database` and `schema`: of the outbox's tables (`outbox db upgrade`). Does no I/O."""
        self._engine = open_engine(database)
        self._store = InboxStore(dialect=self._engine.dialect, schema=schema)
        listen_to_engines()

    def handle(
        self, session: Session, message_id: str, group: str, handler: Callable[[Session], object], *, topic: str
    ) -> Outcome:
        """Call the handler with the session, unless the group has handled this message before.

        `session` has an open transaction, which the caller commits before acknowledging the message. An error of the
        handler is re-raised: roll back, and do not acknowledge. A duplicate that another consumer handles at the same
        time waits for that transaction's end. Raises InvalidMessage for an invalid id, group or topic,
        TransactionDoomed if the handler swallowed an error that has rolled the transaction back, and NoTransaction if
        it has rolled back or closed the session.
        """
        if is_async(handler):
            raise ConfigurationError(
                f"the handler {handler_name(handler)} is async: await inbox.handle_async(...) with an AsyncSession"
            )
        refuse_generator(handler)
        connection = _connection(session)
        if not self._mark(connection, message_id, group, topic):
            return Outcome.DEDUPLICATED
        begun = connection.get_transaction()
        call_handler(handler, session)
        if not self._is_kept(connection, begun, message_id, group, topic):
            raise NoTransaction(ENDED_BY_HANDLER)
        return Outcome.HANDLED

    async def handle_async(
        self,
        session: AsyncSession,
        message_id: str,
        group: str,
        handler: Callable[[AsyncSession], Awaitable[object]],
        *,
        topic: str,
    ) -> Outcome:
        """The same as handle() for an `async def` handler."""
        refuse_generator(handler)
        if not session.in_transaction():
            raise NoTransaction(_NO_TRANSACTION)
        connection = await session.connection()
        if not await connection.run_sync(self._mark, message_id, group, topic):
            return Outcome.DEDUPLICATED
        begun = await connection.run_sync(Connection.get_transaction)
        await await_handler(handler, session)
        if not await connection.run_sync(self._is_kept, begun, message_id, group, topic):
            raise NoTransaction(ENDED_BY_HANDLER)
        return Outcome.HANDLED

    def _mark(self, connection: Connection, message_id: str, group: str, topic: str) -> bool:
        refuse_autocommit(connection, "effect and mark would not commit together")
        connect_once(self._engine)  # the session may be another engine's
        is_new = self._store.mark(
            connection, group=check_group(group), message_id=check_message_id(message_id), topic=check_topic(topic)
        )
        keep_mark(connection)
        return is_new

    def _is_kept(
        self, connection: Connection, begun: RootTransaction | None, message_id: str, group: str, topic: str
    ) -> bool:
        """Returns whether the mark is in the open transaction, or committed by the handler."""
        was_ended = is_over(connection, begun)
        refuse_if_rolled_back(connection)
        if not was_ended:
            return True
        if ending_statement(connection) is not None:
            refuse_autocommit(connection, "effect and mark do not commit together")
        with connection.engine.connect() as other:
            is_committed = self._store.handled(other, group=group, message_id=message_id, topic=topic)
        if is_committed:
            forget_mark(connection)
        return is_committed


_NO_TRANSACTION = (
    "the mark belongs to the handler's transaction: open one before, with session.begin(), and acknowledge the message "
    "after it has committed"
)


def _connection(session: Session) -> Connection:
    if not session.in_transaction():
        raise NoTransaction(_NO_TRANSACTION)
    return session.connection()
