"""The inbox's SQL: records which messages a consumer group has handled, in the handler's own transaction.

A message is identified by its topic and id: other producers may use the same id on other topics.
"""

from __future__ import annotations

from functools import cached_property

from sqlalchemy import Connection, Insert, Table, bindparam, delete, insert, select
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

from outbox.store.database import is_duplicate, is_schema_missing
from outbox.store.database_identity import StrangerCheck
from outbox.store.databases.supported import database_of
from outbox.store.schema import outbox_tables
from outbox.store.table_placement import is_left_beside, table_namespace, tables_missing


class InboxStore:
    """The statements on the inbox table. Opens no connection and commits nothing."""

    def __init__(self, *, dialect: Dialect, schema: str | None = None) -> None:
        self._dialect = dialect
        self._schema = schema
        self._now_us = database_of(dialect).now_us()
        self._strangers = StrangerCheck(dialect, [schema])

    @cached_property
    def _inbox(self) -> Table:
        return outbox_tables(table_namespace(self._dialect, self._schema)).inbox

    @cached_property
    def _insert(self) -> Insert:
        return insert(self._inbox).values(
            consumer_group=bindparam("group"),
            message_id=bindparam("id"),
            topic=bindparam("on_topic"),
            handled_at_us=self._now_us,
        )

    def mark(self, connection: Connection, *, group: str, message_id: str, topic: str) -> bool:
        """Mark the message as handled; returns False if it was marked already.

        A concurrent duplicate waits here for the first one's transaction and its outcome: it is handled, or rolled
        back and to be handled now. The mark is the transaction's first statement, so that it also keeps the order.
        """
        try:
            # Without a savepoint: a duplicate rolls back only this statement, and a deadlock removes savepoints too,
            # so that its error would hide the deadlock's.
            connection.execute(self._insert, {"group": group, "id": message_id, "on_topic": topic})
            is_new = True
        except DBAPIError as error:
            if is_duplicate(error):
                is_new = False
            elif is_schema_missing(error) and is_left_beside(connection, self._schema):
                raise tables_missing(connection, self._schema) from error
            else:
                raise
        # Behind the INSERT, the transaction's first statement; a duplicate may be another service's message.
        self._strangers.run(connection)
        return is_new

    def handled(self, connection: Connection, *, group: str, message_id: str, topic: str) -> bool:
        """Returns whether the group has handled this message."""
        inbox = self._inbox
        statement = select(inbox.c.message_id).where(
            inbox.c.consumer_group == group, inbox.c.topic == topic, inbox.c.message_id == message_id
        )
        statement = statement.limit(1)  # it overrides a session's sql_select_limit of 0
        return connection.scalar(statement) is not None

    def purge(self, connection: Connection, *, older_than_us: int, limit: int) -> int:
        """Delete at most `limit` marks older than `older_than_us`; returns how many.

        Keep marks longer than any redelivery may take. For a connection at READ COMMITTED: it locks only the rows that
        it deletes, and none of running consumers.
        """
        inbox = self._inbox
        select_old = (
            select(
                inbox.c.consumer_group.label("of_group"),
                inbox.c.topic.label("of_topic"),
                inbox.c.message_id.label("of_id"),
            )
            .where(inbox.c.handled_at_us < self._now_us - older_than_us)
            .order_by(inbox.c.handled_at_us)
            .limit(limit)
        )
        keys = sorted(tuple(row) for row in connection.execute(select_old))
        if not keys:
            return 0
        # Each by the complete primary key: for a list of ids the optimizer may read all of a group, and then wait for
        # uncommitted marks.
        statement = delete(inbox).where(
            inbox.c.consumer_group == bindparam("of_group"),
            inbox.c.topic == bindparam("of_topic"),
            inbox.c.message_id == bindparam("of_id"),
        )
        marks = [{"of_group": group, "of_topic": topic, "of_id": message_id} for group, topic, message_id in keys]
        return connection.execute(statement, marks).rowcount
